//! The quantizer in a recorded forward pass: recorded as one node, called with values.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Tensor};
use burn_lean_graph::Role;
use burn_lean_graph::hooks::{self, Hook, HookedAt};

use crate::module::listen::listener::Listener;
use crate::module::listen::shown_inputs::ShownInputs;
use crate::module::on_tape::on_tape;
use crate::{FakeQuantize, FakeQuantizeConfig, Granularity, Learned, ObserverConfig, QuantError};

/// A quantizer of a model that is recorded or executed; it shares the state of the model's own.
struct Hooked(FakeQuantize);

impl FakeQuantize {
    /// Offers the quantizer to a recording or execution; whether there is one.
    pub(crate) fn offer(&self) -> bool {
        if let Some(Listener::Inputs { into, weight }) = self.listener() {
            // An identity of its own: that of the quantizer is an address of many bytes.
            hooks::offer(self.identity() + 1, || {
                Arc::new(ShownInputs {
                    into: into.clone(),
                    weight: weight.clone(),
                })
            });
        }
        hooks::offer(self.identity(), || Arc::new(Hooked(self.handle())))
    }

    /// Whether each step of a recurrence has a range of its own: one of the values at hand does not know of
    /// later steps. A row has its own in either case, and a learned scale is one for all.
    pub(crate) fn takes_steps(&self) -> bool {
        let FakeQuantizeConfig {
            scheme,
            observer,
            learned,
        } = self.config();
        let is_of_these_values =
            *observer == ObserverConfig::Memoryless && *learned == Learned::None;
        is_of_these_values && scheme.granularity != Granularity::PerToken
    }

    /// In a recording, what stands for the quantized `x`.
    pub(crate) fn stand_in<const D: usize>(&self, x: &Tensor<D>) -> Option<Tensor<D>> {
        hooks::stand_in(x, self.identity())
    }

    /// In a recording, what stands for the values of the weight that is stored as `base`.
    pub(crate) fn weight_stand_in<const D: usize>(&self, base: &Tensor<D>) -> Option<Tensor<D>> {
        // A recording knows codes as F32; their values have the dtype that the weight had.
        match self.dequantize() {
            Some(_) => hooks::stand_in_as(base, self.identity(), self.dtype()),
            None => self.stand_in(base),
        }
    }
}

impl Hook for Hooked {
    fn name(&self) -> &'static str {
        "fake_quantize"
    }

    fn role(&self) -> Option<(Role, usize)> {
        // The weight itself asks for its quantizer.
        self.0.role().filter(|(role, _)| *role != Role::Weight)
    }

    fn check(&self) -> Result<(), String> {
        self.0.check().map_err(|error| error.to_string())
    }

    fn takes_parts(&self) -> bool {
        self.0.takes_steps()
    }

    fn freezes_batch_norm(&self) -> bool {
        self.0.schedule().freezes_batch_norm(self.0.step())
    }

    fn has_acted(&self) -> bool {
        self.0.has_acted()
    }

    fn step_taken(&self, has_acted: bool) -> Option<&'static str> {
        self.0.step_taken(has_acted)
    }

    fn apply(&self, tensor: DispatchTensor, at: &HookedAt<'_>) -> Result<DispatchTensor, String> {
        self.check()?;
        let quantized = match tensor.shape().num_dims() {
            1 => self.quantize::<1>(tensor, &at.device),
            2 => self.quantize::<2>(tensor, &at.device),
            3 => self.quantize::<3>(tensor, &at.device),
            4 => self.quantize::<4>(tensor, &at.device),
            5 => self.quantize::<5>(tensor, &at.device),
            6 => self.quantize::<6>(tensor, &at.device),
            rank => return Err(format!("a tensor of {rank} axes is more than 6")),
        };
        quantized.map_err(|error| error.to_string())
    }
}

impl Hooked {
    fn quantize<const D: usize>(
        &self,
        tensor: DispatchTensor,
        device: &Device,
    ) -> Result<DispatchTensor, QuantError> {
        let Self(quantizer) = self;
        let x = Tensor::<D>::from_dispatch(tensor);
        if quantizer.is_of_weight() || matches!(x.dtype(), DType::QFloat(_)) {
            return Ok(quantizer.weight_values(x).into_dispatch());
        }
        // A batch that was made without autodiff is a constant in training, and observed like any
        // other.
        let x = match device.gradient_checkpointing_strategy() {
            Some(strategy) if !x.is_autodiff() => on_tape(x, strategy),
            _ => x,
        };
        Ok(quantizer.try_forward(x)?.into_dispatch())
    }
}
