//! The JSON of the layout, as far as it is read and written here.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub(super) const METHOD: &str = "compressed-tensors";
pub(super) const KEY: &str = "quantization_config";
pub(super) const INT: &str = "int-quantized";
pub(super) const PACKED: &str = "pack-quantized";
pub(super) const DENSE: &str = "dense";
/// Of groups of several formats.
pub(super) const MIXED: &str = "mixed-precision";
/// What a range of the values at hand adds to the name of a scheme.
pub(super) const DYNAMIC: &str = ", dynamic";
/// Of the library that packs as it is done here.
pub(super) const VERSION: &str = "0.18.0";

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct QuantizationConfig {
    pub(super) quant_method: String,
    /// Of the library that wrote it, or that writes so.
    #[serde(default)]
    pub(super) version: Option<String>,
    #[serde(default)]
    pub(super) format: String,
    #[serde(default)]
    pub(super) quantization_status: String,
    #[serde(default)]
    pub(super) ignore: Vec<String>,
    #[serde(default)]
    pub(super) config_groups: BTreeMap<String, Group>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) targets: Vec<String>,
    pub(super) weights: Option<Arguments>,
    pub(super) input_activations: Option<Arguments>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) format: Option<String>,
}

impl Group {
    /// With these layers in the group of the same settings, or as a new one.
    pub(super) fn joins(
        mut self,
        groups: &mut Vec<Self>,
        layers: impl IntoIterator<Item = String>,
    ) {
        let mut known = groups.iter_mut();
        let same = known.find(|one| {
            let settings = |group: &Self| (group.weights.clone(), group.input_activations.clone());
            settings(one) == settings(&self) && one.format == self.format
        });
        match same {
            Some(known) => known.targets.extend(layers),
            None => {
                self.targets.extend(layers);
                groups.push(self);
            }
        }
    }
}

/// How numbers are quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Arguments {
    pub(super) num_bits: u8,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) symmetric: bool,
    #[serde(default)]
    pub(super) strategy: Option<String>,
    #[serde(default)]
    pub(super) group_size: Option<i64>,
    /// A flag, or the name of a kind that is not read here.
    #[serde(default)]
    pub(super) dynamic: serde_json::Value,
}

impl Arguments {
    pub(super) fn is_dynamic(&self) -> bool {
        !matches!(
            self.dynamic,
            serde_json::Value::Null | serde_json::Value::Bool(false)
        )
    }
}

/// As a [`Scheme`](crate::Scheme) prints.
impl fmt::Display for Arguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapping = match self.symmetric {
            true => "symmetric",
            false => "affine",
        };
        write!(
            f,
            "{}{}, {mapping}",
            self.kind.to_uppercase(),
            self.num_bits
        )?;
        match (self.strategy.as_deref(), self.group_size) {
            (None, _) => {}
            (Some("group"), Some(size)) => write!(f, ", per group of {size}")?,
            (Some(strategy), _) => write!(f, ", per {strategy}")?,
        }
        match self.is_dynamic() {
            true => f.write_str(DYNAMIC),
            false => Ok(()),
        }
    }
}

impl QuantizationConfig {
    /// Of groups, each with its format, and of linear layers that none has.
    pub(super) fn of(groups: Vec<Group>, ignore: Vec<String>) -> Self {
        let mut formats: Vec<&String> = groups.iter().flat_map(|group| &group.format).collect();
        formats.sort();
        formats.dedup();
        let format = match formats[..] {
            [] => DENSE,
            [only] => only,
            _ => MIXED,
        };
        Self {
            quant_method: METHOD.into(),
            version: Some(VERSION.into()),
            format: format.into(),
            quantization_status: "compressed".into(),
            ignore: match groups.is_empty() {
                true => Vec::new(),
                false => ignore,
            },
            config_groups: (groups.into_iter().enumerate())
                .map(|(index, group)| (format!("group_{index}"), group))
                .collect(),
        }
    }

    /// Whether codes of 3, 5, 6 and 7 bits lie without gaps, as they do since 0.18.
    pub(super) fn is_dense(&self) -> bool {
        let numbers = |version: &str| -> Vec<u32> {
            version
                .split('.')
                .map_while(|part| part.parse().ok())
                .collect()
        };
        let version = self.version.as_deref().map(numbers);
        version.is_some_and(|found| found >= numbers(VERSION))
    }
}
