//! How a file is loaded.

use std::path::Path;

use burn::config::Config;
use burn::module::Module;
use burn_lean_reparam::Rejected;

use super::load::try_load;
use crate::{ConversionReport, Dequantize, QuantError};

/// How a file of [`save_safetensors`](crate::save_safetensors) is loaded.
///
/// ```
/// use burn_lean_quant::{Dequantize, LoadConfig};
///
/// assert_eq!(LoadConfig::new().dequantize, Dequantize::Once);
/// ```
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct LoadConfig {
    /// When the float values of weights are computed. Default: once, which is as fast as the float
    /// model.
    #[config(default = "Dequantize::Once")]
    pub dequantize: Dequantize,
}

impl Default for LoadConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadConfig {
    /// Loads a file of [`save_safetensors`](crate::save_safetensors) into `model`, for inference,
    /// and reports what became of each weight.
    ///
    /// `model` is as it was before it was quantized: of its architecture alone, in a process that knows no
    /// configuration of its training. Or it is prepared the same way as the one that was saved, with or without
    /// the pruning masks before its quantizers, which are part of the codes and are taken off.
    ///
    /// - Where the file has ranges of activations, a model that is not prepared gets the quantizers that it
    ///   names, at the places where they were, attention and sums included; they act in
    ///   [`QuantizedForward::run`](crate::QuantizedForward::run), and in an
    ///   export. For those of a layer whose weight stayed float, and those that had no range yet, the model has to be
    ///   prepared.
    /// - In a prepared model quantized weights become quantized tensors of Burn. One that Burn or the
    ///   device cannot hold so becomes floats, of the same values; a file of the loaded model has
    ///   its codes again.
    /// - A model that is not prepared, of a file of weights alone, has no place for values beside the
    ///   codes: its weights become floats, or with [`Dequantize::EveryUse`] quantized tensors of Burn, which Burn's layers
    ///   dequantize in each forward pass; linear ones multiply by the codes where the device has such a
    ///   product. With [`Dequantize::InProduct`] those alone are quantized tensors; on a CPU none is, since kernels find
    ///   codes by quantizers.
    /// - Other tensors have the dtypes of the file; floats of half precision are F32 on a device that has
    ///   none.
    ///
    /// # Errors
    ///
    /// Each with the model inside: [`QuantError::File`] when the file cannot be read, is damaged, is
    /// of something else, or does not fit the model; [`QuantError::ForeignScheme`] for a weight or
    /// an activation that was quantized with another scheme than the model's;
    /// [`QuantError::UnsupportedStorage`] for a weight that cannot be held quantized, and which
    /// something that acts on it after its quantizer would change.
    pub fn load<M: Module>(
        &self,
        model: M,
        path: impl AsRef<Path>,
    ) -> Result<(M, ConversionReport), Rejected<M, QuantError>> {
        try_load(&model, path.as_ref(), *self).map_err(|error| Rejected::new(model, error))
    }
}

/// [`LoadConfig::load`] as it is by default, without the report.
///
/// # Errors
///
/// As [`LoadConfig::load`].
pub fn load_safetensors<M: Module>(
    model: M,
    path: impl AsRef<Path>,
) -> Result<M, Rejected<M, QuantError>> {
    LoadConfig::new()
        .load(model, path)
        .map(|(loaded, _)| loaded)
}
