//! What differs for some layers.

use burn::config::Config;

use crate::{FakeQuantizeConfig, QuantError, WeightConfig};

/// Other choices for the weights at some paths, and for the layers they belong to.
///
/// ```
/// use burn_lean_quant::Override;
///
/// let first = Override::new("encoder.0".into()).with_skip(Some(true));
/// assert!(first.matches("encoder.0.conv.weight"));
/// assert!(!first.matches("encoder.01.conv.weight"));
/// assert!(Override::new("encoder.*.conv".into()).matches("encoder.3.conv.weight"));
/// assert!(Override::new("**.fc2.weight".into()).matches("head.mlp.fc2.weight"));
/// ```
#[derive(Config, Debug)]
pub struct Override {
    /// Path of a weight or of a module that holds some, for example `encoder.0`. `*` stands for
    /// any characters but dots, `**` for any.
    pub pattern: String,
    /// Neither weights nor activations. Default: as elsewhere.
    #[config(default = "None")]
    pub skip: Option<bool>,
    /// Activations only. Default: as elsewhere.
    #[config(default = "None")]
    pub skip_weight: Option<bool>,
    /// Weights only. Default: as elsewhere; what says how activations are quantized takes it back.
    #[config(default = "None")]
    pub skip_activation: Option<bool>,
    /// How the weights are quantized. Default: as elsewhere.
    #[config(default = "None")]
    pub weight: Option<WeightConfig>,
    /// How activations are quantized. Default: as elsewhere.
    #[config(default = "None")]
    pub activation: Option<FakeQuantizeConfig>,
    /// Bits of the weights, 2 to 8. Default: as elsewhere.
    #[config(default = "None")]
    pub weight_bits: Option<u8>,
    /// Bits of the activations, 2 to 8. Default: as elsewhere.
    #[config(default = "None")]
    pub activation_bits: Option<u8>,
    /// Whether the layer's output is quantized. Default: as elsewhere.
    #[config(default = "None")]
    pub outputs: Option<bool>,
    /// Axis of the output channels. Needed for weights of the model's own modules, which are left
    /// out otherwise. Default: that of the layer, in those that Burn has.
    #[config(default = "None")]
    pub axis: Option<usize>,
}

impl Override {
    /// # Errors
    ///
    /// [`QuantError::InvalidConfig`] if it leaves activations out and says how they are quantized.
    pub(crate) fn validate(&self) -> Result<(), QuantError> {
        let skips = self.skip_activation == Some(true);
        match skips && (self.activation.is_some() || self.wants_activations()) {
            false => Ok(()),
            true => Err(QuantError::InvalidConfig {
                field: "skip_activation",
                value: format!("true for `{}`", self.pattern),
                expected: "left out where the override says how activations are quantized",
            }),
        }
    }

    /// Whether it changes activations that something else quantizes.
    pub(crate) fn wants_activations(&self) -> bool {
        self.activation_bits.is_some() || self.outputs == Some(true)
    }

    /// What of activations it chooses.
    pub(crate) fn wish(&self) -> String {
        format!("`{}` chooses outputs or bits", self.pattern)
    }

    /// Whether the pattern is that of this parameter, or of a module that holds it.
    pub fn matches(&self, path: &str) -> bool {
        let ends = path.match_indices('.').map(|(index, _)| index);
        ends.chain([path.len()])
            .any(|end| glob(self.pattern.as_bytes(), &path.as_bytes()[..end]))
    }
}

fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match pattern {
        [] => text.is_empty(),
        [b'*', b'*', rest @ ..] => (0..=text.len()).any(|skipped| glob(rest, &text[skipped..])),
        [b'*', rest @ ..] => {
            let segment = text.iter().position(|byte| *byte == b'.');
            let segment = segment.unwrap_or(text.len());
            (0..=segment).any(|skipped| glob(rest, &text[skipped..]))
        }
        [first, rest @ ..] => text.first() == Some(first) && glob(rest, &text[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::glob;

    #[test]
    fn a_star_stays_within_a_segment_and_two_cross_them() {
        let matches = |pattern: &str, text: &str| glob(pattern.as_bytes(), text.as_bytes());
        assert!(matches("a.*.c", "a.b.c"));
        assert!(!matches("a.*.c", "a.b.b.c"));
        assert!(matches("a.**.c", "a.b.b.c"));
        assert!(matches("**", ""));
        assert!(!matches("a", "ab"));
        assert!(!matches("ab", "a"));
    }
}
