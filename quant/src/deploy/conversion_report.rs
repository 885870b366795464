//! What a conversion did, and how close the converted model is.

use std::fmt;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::codes::product::Kernel;
use crate::deploy::convert::OtherBytes;
use crate::table::table;
use crate::{Dequantize, Scheme, model::LeftFloat};

/// What became of a weight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// It is a quantized tensor of Burn now.
    Converted {
        /// Burn's type of its values, for example `Q8S`.
        value: String,
        /// Where they are kept, for example `Native`.
        store: String,
    },
    /// It was one before.
    AlreadyConverted,
    /// It is a float tensor, of the values of the codes that were loaded.
    Dequantized,
    /// It stayed as it was, since Burn cannot hold it.
    KeptFakeQuantized {
        /// Why.
        reason: String,
    },
}

/// One weight in a [`ConversionReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConvertedWeight {
    /// Its path.
    pub path: String,
    /// Its scheme, as it prints.
    pub scheme: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What became of it.
    pub outcome: Outcome,
    /// Bytes as the device holds it, and as Burn's record stores it, scales included.
    pub bytes: usize,
    /// Bytes with as many bits for each code as the scheme has, scales included: what
    /// [`save_safetensors`](crate::save_safetensors) stores.
    pub packed_bytes: usize,
    /// Bytes in memory once the model has run: [`bytes`](Self::bytes), and those of the values or packed codes, where
    /// they are kept beside the codes.
    pub resident_bytes: usize,
    /// When the float values that the layer multiplies with are computed.
    pub dequantize: Dequantize,
    /// Why it is dequantized once, where something else was asked for.
    #[serde(default)]
    pub why_once: Option<String>,
    /// Whether the layer rounds its input or output in every call: of all that a converted model does
    /// in Burn the one thing that the float model does not, and what makes it slower. See
    /// [`Activations`](crate::Activations).
    #[serde(default)]
    pub rounds_activations: bool,
    /// Whether a layer that is called by [`forward_q`](crate::ForwardQ::forward_q) multiplies the codes of its rounded
    /// input by those of the weight, on a CPU: see [`Dequantize::InProduct`].
    #[serde(default)]
    pub multiplies_integers: bool,
    /// Largest difference between the fake-quantized and the converted model at this layer, once
    /// [`compare`](crate::compare) has run both.
    pub mismatch: Option<Mismatch>,
}

/// How far two models are apart at one layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Largest difference between weight codes; 0 unless something is broken.
    pub weight_codes: u32,
    /// Largest difference between the codes of the layer's quantized activations, over all
    /// samples, in steps; `None` where none is quantized.
    pub activation_codes: Option<u32>,
    /// Activation codes that differ at all, as a fraction of those compared.
    pub differing: f64,
}

/// How far two models are apart at activations whose weight is not in the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationMismatch {
    /// Path of the quantizer, or of the weight of the layer that it belongs to.
    pub path: String,
    /// Largest difference between the codes, over all samples, in steps.
    pub codes: u32,
    /// Codes that differ at all, as a fraction of those compared.
    pub differing: f64,
}

/// What [`ConvertConfig::convert`](crate::ConvertConfig::convert) did.
///
/// Unless products read codes ([`Dequantize::InProduct`]), a converted model multiplies floats in Burn, as fast as the
/// float model or, where it
/// rounds activations on the way, somewhat slower ([`Activations`](crate::Activations)).
///
/// Prints as a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConversionReport {
    /// The weights, in module order.
    pub weights: Vec<ConvertedWeight>,
    /// Differences at activations whose weight is not quantized and at quantizers of the model's
    /// own, by path, once [`compare`](crate::compare) has run.
    #[serde(default)]
    pub activations: Vec<ActivationMismatch>,
    /// Activations that are not quantized, though the model has quantizers for them.
    #[serde(default)]
    pub left_float: Vec<LeftFloat>,
    /// Bytes of all other tensors of the model: biases, norms, running statistics, quantizer
    /// state.
    pub other_bytes: usize,
    /// Those that a file has, too: without the ranges of weights, whose scales it has.
    pub other_packed_bytes: usize,
    /// Largest difference of the model's output over all samples, once
    /// [`compare`](crate::compare) has run; infinite where only one of the two is a number.
    #[serde(with = "crate::table::optional_float32")]
    pub output_difference: Option<f32>,
}

impl ConversionReport {
    pub(crate) fn new(
        weights: Vec<ConvertedWeight>,
        others: OtherBytes,
        left_float: Vec<LeftFloat>,
    ) -> Self {
        Self {
            weights,
            activations: Vec::new(),
            left_float,
            other_bytes: others.held,
            other_packed_bytes: others.in_file,
            output_difference: None,
        }
    }

    /// Bytes of the whole model on the device.
    pub fn bytes(&self) -> usize {
        self.other_bytes + self.weights.iter().map(|w| w.bytes).sum::<usize>()
    }

    /// Bytes of the whole model in memory once it has run: with the values of weights that are
    /// computed once.
    pub fn resident_bytes(&self) -> usize {
        self.other_bytes + self.weights.iter().map(|w| w.resident_bytes).sum::<usize>()
    }

    /// Bytes of the whole model to ship: what the tensors take up in the file that
    /// [`save_safetensors`](crate::save_safetensors) writes.
    pub fn packed_bytes(&self) -> usize {
        self.other_packed_bytes + self.weights.iter().map(|w| w.packed_bytes).sum::<usize>()
    }

    /// Bytes of the whole model with its weights in F32.
    pub fn float_bytes(&self) -> usize {
        self.other_bytes
            + self
                .weights
                .iter()
                .map(ConvertedWeight::float_bytes)
                .sum::<usize>()
    }

    /// Bytes on the device as a fraction of those with F32 weights.
    pub fn ratio(&self) -> f64 {
        self.bytes() as f64 / self.float_bytes() as f64
    }

    /// The largest difference of weight and activation codes, over all layers and quantizers.
    pub fn largest_mismatch(&self) -> Option<u32> {
        let mismatches = self.weights.iter().filter_map(|w| w.mismatch);
        let largest = |m: Mismatch| m.weight_codes.max(m.activation_codes.unwrap_or(0));
        let activations = self.activations.iter().map(|activation| activation.codes);
        mismatches.map(largest).chain(activations).max()
    }
}

impl ConvertedWeight {
    /// Nothing is counted yet.
    pub(crate) fn new(
        path: &str,
        scheme: &Scheme,
        shape: &[usize],
        outcome: Outcome,
        dequantize: Dequantize,
    ) -> Self {
        Self {
            path: path.into(),
            scheme: scheme.to_string(),
            shape: shape.to_vec(),
            outcome,
            bytes: 0,
            packed_bytes: 0,
            resident_bytes: 0,
            dequantize,
            why_once: None,
            rounds_activations: false,
            multiplies_integers: false,
            mismatch: None,
        }
    }

    /// Counts the values as kept beside what is held, if they are.
    pub(crate) fn hold_values(&mut self, bytes: usize) {
        self.resident_bytes = match self.dequantize {
            Dequantize::Once => self.bytes + bytes,
            Dequantize::EveryUse | Dequantize::InProduct => self.bytes,
        };
    }

    /// What was found of the product of its codes, which was asked for; the bytes that a kernel keeps.
    pub(crate) fn take(&mut self, looked_at: Result<Kernel, String>) -> usize {
        match looked_at {
            Ok(kernel) => {
                self.multiplies_integers = kernel.is_integer;
                kernel.bytes
            }
            Err(reason) => {
                self.dequantize = Dequantize::Once;
                self.why_once = Some(reason);
                0
            }
        }
    }

    /// When its values are computed, and whether activations are rounded, in words.
    fn forward_pass(&self) -> String {
        let weight = self.weight_in_forward_pass();
        match self.rounds_activations {
            true if self.multiplies_integers => "integer".into(),
            true => format!("{weight}, activations rounded at every use"),
            false => weight,
        }
    }

    fn weight_in_forward_pass(&self) -> String {
        match (&self.outcome, self.dequantize) {
            (Outcome::KeptFakeQuantized { .. }, Dequantize::Once) => "float".into(),
            (Outcome::Dequantized, _) => "float".into(),
            (Outcome::KeptFakeQuantized { .. }, _) => "fake-quantized at every use".into(),
            (_, dequantize) => dequantize.to_string(),
        }
    }

    /// Bytes in F32.
    pub fn float_bytes(&self) -> usize {
        4 * self.shape.iter().product::<usize>()
    }
}

impl Outcome {
    /// Of a tensor that was made for a quantized weight.
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        match tensor.dtype() {
            DType::QFloat(scheme) => Self::Converted {
                value: format!("{:?}", scheme.value),
                store: format!("{:?}", scheme.store),
            },
            _ => Self::Dequantized,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Converted { value, store } => write!(f, "{value} {store}"),
            Self::AlreadyConverted => f.write_str("already converted"),
            Self::Dequantized => f.write_str("float"),
            Self::KeptFakeQuantized { .. } => f.write_str("float, fake-quantized"),
        }
    }
}

impl fmt::Display for ConversionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&[
            "weight",
            "scheme",
            "held as",
            "forward pass",
            "bytes",
            "resident",
            "packed",
            "F32",
            "weight codes off",
            "activation codes off",
        ]);
        for weight in &self.weights {
            let of = |value: Option<u32>| value.map_or("-".to_string(), |value| value.to_string());
            table.add_row([
                weight.path.clone(),
                weight.scheme.clone(),
                weight.outcome.to_string(),
                weight.forward_pass(),
                weight.bytes.to_string(),
                weight.resident_bytes.to_string(),
                weight.packed_bytes.to_string(),
                weight.float_bytes().to_string(),
                of(weight.mismatch.map(|m| m.weight_codes)),
                of(weight.mismatch.and_then(|m| m.activation_codes)),
            ]);
        }
        table.add_row([
            "other tensors".to_string(),
            String::new(),
            String::new(),
            String::new(),
            self.other_bytes.to_string(),
            self.other_bytes.to_string(),
            self.other_packed_bytes.to_string(),
            self.other_bytes.to_string(),
        ]);
        table.add_row([
            "total".to_string(),
            String::new(),
            format!("{:.3} of F32", self.ratio()),
            String::new(),
            self.bytes().to_string(),
            self.resident_bytes().to_string(),
            self.packed_bytes().to_string(),
            self.float_bytes().to_string(),
        ]);
        writeln!(f, "{table}")?;
        let rounds_floats =
            |weight: &ConvertedWeight| weight.rounds_activations && !weight.multiplies_integers;
        if self.weights.iter().any(rounds_floats) {
            writeln!(
                f,
                "in Burn it computes with floats and rounds activations on the way, somewhat slower than FP32: \
                 `EngineConfig` of `deploy` computes in integers, on a CPU `Dequantize::InProduct` in linear layers and \
                 convolutions; `Activations::Float` leaves activations alone"
            )?;
        }
        for weight in &self.weights {
            if let Outcome::KeptFakeQuantized { reason } = &weight.outcome {
                writeln!(f, "`{}` stays fake-quantized: {reason}", weight.path)?;
            }
        }
        for weight in &self.weights {
            if let Some(reason) = &weight.why_once {
                writeln!(f, "`{}` is dequantized once: {reason}", weight.path)?;
            }
        }
        for left in &self.left_float {
            writeln!(f, "{left}")?;
        }
        for ActivationMismatch { path, codes, .. } in &self.activations {
            writeln!(f, "`{path}`: activation codes off by {codes}")?;
        }
        match self.output_difference {
            Some(difference) => writeln!(f, "largest difference of an output: {difference:e}"),
            None => Ok(()),
        }
    }
}
