//! What is chosen for one weight.

use crate::qat::overrides::Override;
use crate::{FakeQuantizeConfig, NumberFormat, QatConfig, WeightConfig};

/// What the config and its overrides come to for one weight.
pub(super) struct Choices {
    pub(super) weight: WeightConfig,
    pub(super) activation: Option<FakeQuantizeConfig>,
    pub(super) outputs: bool,
    pub(super) axis: Option<usize>,
    pub(super) skip: bool,
    pub(super) skip_weight: bool,
    skip_activation: bool,
}

impl Choices {
    pub(super) fn of(config: &QatConfig, path: &str) -> Self {
        let mut choices = Self {
            weight: config.weight.clone(),
            activation: config.activation.clone(),
            outputs: config.outputs,
            axis: None,
            skip: false,
            skip_weight: false,
            skip_activation: false,
        };
        for choice in config
            .overrides
            .iter()
            .filter(|choice| choice.matches(path))
        {
            choices.apply(choice);
        }
        if choices.skip_activation {
            choices.activation = None;
        }
        choices
    }

    fn apply(&mut self, choice: &Override) {
        if let Some(weight) = &choice.weight {
            self.weight = weight.clone();
        }
        if let Some(activation) = &choice.activation {
            self.activation = Some(activation.clone());
            self.skip_activation = false;
        }
        if let Some(bits) = choice.weight_bits {
            self.weight.format = with_bits(self.weight.format, bits);
        }
        if let Some(bits) = choice.activation_bits
            && let Some(activation) = &mut self.activation
        {
            activation.scheme.format = with_bits(activation.scheme.format, bits);
        }
        self.outputs = choice.outputs.unwrap_or(self.outputs);
        self.axis = choice.axis.or(self.axis);
        self.skip = choice.skip.unwrap_or(self.skip);
        self.skip_weight = choice.skip_weight.unwrap_or(self.skip_weight);
        self.skip_activation = choice.skip_activation.unwrap_or(self.skip_activation);
    }
}

/// Integers of other width; signed ones for what is no integer.
fn with_bits(format: NumberFormat, bits: u8) -> NumberFormat {
    match format {
        NumberFormat::Int {
            signed,
            narrow_range,
            ..
        } => NumberFormat::Int {
            bits,
            signed,
            narrow_range,
        },
        _ => NumberFormat::int(bits).narrow(),
    }
}
