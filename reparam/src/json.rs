//! Numbers in JSON, which has no NaN and no infinity: those are written as strings, for
//! `#[serde(with = "burn_lean_reparam::json::float")]`. A `null`, which other writers make of them, reads as NaN.

/// Of an F64.
pub mod float {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Number {
        Finite(f64),
        Other(String),
    }

    /// A number, or its name.
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        match value.is_finite() {
            true => Number::Finite(*value).serialize(serializer),
            false => Number::Other(value.to_string()).serialize(serializer),
        }
    }

    /// The way back.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Option::<Number>::deserialize(deserializer)? {
            Some(Number::Finite(value)) => Ok(value),
            Some(Number::Other(text)) => text.parse().map_err(serde::de::Error::custom),
            None => Ok(f64::NAN),
        }
    }
}

/// As [`float`], of an F32.
pub mod float32 {
    use serde::{Deserializer, Serialize, Serializer};

    use super::float;

    /// A number, or its name.
    pub fn serialize<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
        match value.is_finite() {
            // In as few digits as an F32 needs.
            true => value.serialize(serializer),
            false => float::serialize(&f64::from(*value), serializer),
        }
    }

    /// The way back.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
        float::deserialize(deserializer).map(|value| value as f32)
    }
}
