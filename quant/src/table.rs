//! How reports print, and how their numbers are written.

pub(crate) use burn_lean_reparam::json::float;
use comfy_table::{Table, presets};

pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(header.to_vec());
    table
}

/// A fraction as percent.
pub(crate) fn percent(fraction: f64) -> String {
    format!("{:.2}", 100.0 * fraction)
}

/// 10 · log₁₀(signal / noise), in dB.
pub(crate) fn decibels(signal: f64, noise: f64) -> f64 {
    match noise {
        0.0 => f64::INFINITY,
        _ => 10.0 * (signal / noise).log10(),
    }
}

/// As [`float`], of an optional F32.
pub(crate) mod optional_float32 {
    use serde::{Deserializer, Serializer};

    use super::optional_float;

    pub(crate) fn serialize<S: Serializer>(
        value: &Option<f32>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        optional_float::serialize(&value.map(f64::from), serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f32>, D::Error> {
        let value = optional_float::deserialize(deserializer)?;
        Ok(value.map(|value| value as f32))
    }
}

/// As [`float`], of an optional number.
pub(crate) mod optional_float {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Number(#[serde(with = "super::float")] f64);

    pub(crate) fn serialize<S: Serializer>(
        value: &Option<f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(Number).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f64>, D::Error> {
        let value = Option::<Number>::deserialize(deserializer)?;
        Ok(value.map(|Number(value)| value))
    }
}

/// As [`float`], of pairs with something else.
pub(crate) mod float_pairs {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Pair<T>(T, #[serde(with = "super::float")] f64);

    pub(crate) fn serialize<T: Serialize + Clone, S: Serializer>(
        pairs: &[(T, f64)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let pairs = pairs.iter().cloned().map(|(key, value)| Pair(key, value));
        serializer.collect_seq(pairs)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(T, f64)>, D::Error> {
        let pairs = Vec::<Pair<T>>::deserialize(deserializer)?;
        Ok(pairs
            .into_iter()
            .map(|Pair(key, value)| (key, value))
            .collect())
    }
}
