//! The quantizer of a weight that is converted: how it is stored, and when its values are computed.

#[cfg(feature = "kernels")]
use std::{any::Any, sync::Arc};

use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::FakeQuantize;
use crate::module::effective;
use crate::module::resident::on_host;
use crate::{Dequantize, QuantParams, fake::Range};

impl FakeQuantize {
    /// With exactly this scale and zero point from now on; a memoryless observer keeps them, too.
    /// Learned ones start from them.
    #[must_use]
    pub(crate) fn with_qparams(self, qparams: QuantParams) -> Self {
        self.edit(|state| {
            state.observer.set_range(Range {
                min: qparams.scale.clone(),
                max: qparams.zero_point.clone(),
            });
            state.control.observed = true;
            state.control.exact = true;
            state.control.codes = false;
            state.control.non_finite = false;
            state.start_learning(qparams);
        })
    }

    /// For how many groups it has a scale, and where.
    pub(crate) fn groups(&self) -> (usize, Device) {
        let scale = self.lock().observer.range().min;
        (scale.shape().num_elements(), scale.device())
    }

    /// Of a weight that is stored as codes, with this scale and zero point: with both.
    pub(crate) fn with_codes(self, qparams: QuantParams) -> Self {
        let quantizer = self.with_qparams(qparams);
        quantizer.edit(|state| state.control.codes = true)
    }

    /// Scale and zero point of a weight that is stored as codes; none of one that is stored as values.
    pub(crate) fn of_codes(&self) -> Option<QuantParams> {
        let state = self.lock();
        let is_stored_as_codes = state.control.exact && state.control.codes;
        is_stored_as_codes.then(|| state.observed_qparams(&self.config.scheme))
    }

    /// Whether the weight is stored as codes.
    pub(crate) fn is_stored_as_codes(&self) -> bool {
        let state = self.lock();
        state.control.exact && state.control.codes
    }

    /// Of a weight: with values of this dtype.
    pub(crate) fn with_dtype(self, dtype: FloatDType) -> Self {
        self.edit(|state| state.control.dtype = dtype)
    }

    /// The dtype of the weight's values.
    pub(crate) fn dtype(&self) -> FloatDType {
        self.lock().control.dtype
    }

    /// Of a weight that is converted now: when its values are computed.
    pub(crate) fn with_dequantize(self, dequantize: Dequantize) -> Self {
        self.edit(|state| state.control.dequantize = Some(dequantize))
    }

    /// When the values of the weight are computed, if it is converted.
    pub(crate) fn dequantize(&self) -> Option<Dequantize> {
        self.lock().control.dequantize
    }

    /// What a weight that is stored as `base` is worth: its values if it is converted, and fake
    /// quantized if it is not.
    pub(crate) fn weight_values<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if self.multiplies_codes(&base) {
            return base;
        }
        match matches!(base.dtype(), DType::QFloat(_)) || self.is_stored_as_codes() {
            // Converted: it is quantized for good. Burn's layers get its values, not the quantized
            // tensor, unless the product was looked at: reshaping blocks quantizes them anew on flex,
            // and the quantized matrix product needs more shared memory than some GPUs have.
            true => self.resident(base, |base| self.stored_values(base)),
            false => {
                effective::given(self.path(), &base);
                self.resident(base, |base| self.forward(base))
            }
        }
    }

    /// Whether the layer gets the codes themselves; whoever listens or asks gets values.
    fn multiplies_codes<const D: usize>(&self, base: &Tensor<D>) -> bool {
        self.is_in_product()
            && matches!(base.dtype(), DType::QFloat(_))
            // Burn's product would dequantize them.
            && !on_host(&base.device())
    }

    /// Whether the layer may multiply by codes as things are.
    pub(crate) fn is_in_product(&self) -> bool {
        self.dequantize() == Some(Dequantize::InProduct) && !self.is_heard()
    }

    /// What was made of them before, where that `fits`, or what `pack` makes
    /// of them.
    #[cfg(feature = "kernels")]
    pub(crate) fn packed<T: Any + Send + Sync>(
        &self,
        fits: impl FnOnce(&T) -> bool,
        pack: impl FnOnce() -> T,
    ) -> Arc<T> {
        self.resident.packed(fits, pack)
    }

    /// Whether somebody wants to hear of every use.
    fn is_heard(&self) -> bool {
        self.listener.is_some() || effective::is_asking()
    }

    /// The values of the weight that is stored as `base`, computed once where it is converted so.
    pub(crate) fn resident<const D: usize>(
        &self,
        base: Tensor<D>,
        compute: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        let is_kept = match self.dequantize() {
            Some(dequantize) => dequantize != Dequantize::EveryUse,
            // A record of a converted model that was loaded by Burn.
            None => matches!(base.dtype(), DType::QFloat(_)),
        };
        match is_kept && !self.is_heard() && !base.is_autodiff() {
            true => self.resident.values(base, compute),
            false => compute(base),
        }
    }
}
