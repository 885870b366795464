//! How much a device rounds in an operation, found by running it.
//!
//! What a product in half precision adds up in is for a kernel to choose: F32, as matrix units do, or half
//! itself, where a sum of ones stays at 2,048 in F16 and at 256 in BF16. Kernels differ by operation, by shape
//! and by what a device is tuned to, and none says which it is.

use burn::backend::ir::TensorIr;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{Device, FloatDType, Shape, Tensor};
use burn_lean_reparam::{catch_quietly, reductions};

use crate::Node;
use crate::interpret::{Operands, noise, run};

/// The largest sum of gradients that is meant to occur: F16 has it, and what is added up to it.
const LARGEST_SUM: f32 = 1024.0;
/// The smallest share of the incoming gradient: its products are still normal numbers of F16.
const SMALLEST: f32 = 1.0 / 4096.0;

impl Node<'_> {
    /// The largest relative error of this operation in `half` on `device`, over the same in F32: of its
    /// result and, where the device has autodiff, of the gradients of its operands.
    ///
    /// Operands and the incoming gradient are positive numbers that `half` has, from one to two times the
    /// smallest, so that nothing cancels and what is lost is lost in sums. With F32 accumulators it is the rounding of
    /// the result: 2⁻¹¹ in F16, 2⁻⁸ in BF16. Takes the time and the memory of the operation and of its backward
    /// pass, in F32 and in `half`, and reads one number.
    ///
    /// `None` where it was not found out: the operation has other operands than floats, or does not run.
    pub fn rounding_error(&self, device: &Device, half: FloatDType) -> Option<f32> {
        let mut tensors = self.operation().inputs().chain(self.operation().outputs());
        if self.operation().outputs().count() != 1 || !tensors.all(|one| one.dtype.is_float()) {
            return None;
        }
        let error = catch_quietly(|| {
            let [exact, rounded] =
                [FloatDType::F32, half].map(|dtype| self.trial(device, half, dtype));
            let pairs = exact?.into_iter().zip(rounded?);
            let errors = pairs.map(|(exact, rounded)| {
                let error = (rounded - exact.clone()).abs() / exact;
                // Neither sum is finite, or an output has no terms.
                let unknown = error.clone().is_nan();
                reductions::max(error.mask_fill(unknown, 0.0))
            });
            let worst = Tensor::cat(errors.collect(), 0).max();
            Some(worst.into_scalar::<f32>())
        });
        error.ok().flatten()
    }

    /// The result of the operation in `dtype`, on numbers that `half` has, and the gradients of its operands:
    /// flat, in F32, without autodiff.
    fn trial(
        &self,
        device: &Device,
        half: FloatDType,
        dtype: FloatDType,
    ) -> Option<Vec<Tensor<1>>> {
        let given = |elements| positive(elements, device).cast(half);
        let mut trial = Trial {
            device: device.as_dispatch().clone(),
            leaves: Vec::new(),
            result: None,
            leaf: |elements| {
                let leaf = given(elements).cast(dtype);
                match device.is_autodiff() {
                    true => leaf.require_grad(),
                    false => leaf,
                }
            },
        };
        run(self.operation(), &mut trial).ok()?;
        let (result, leaves) = (trial.result?, trial.leaves);
        let elements = self.operation().outputs().next()?.shape.num_elements();
        let flat = Dispatch::float_reshape(result, Shape::new([elements]));
        let result = Tensor::<1>::from_dispatch(flat).cast(FloatDType::F32);
        let mut found = vec![result.clone()];
        if device.is_autodiff() {
            // No sum has more terms than the largest tensor has elements.
            let operands = self
                .operation()
                .inputs()
                .map(|one| one.shape.num_elements());
            let terms = operands.fold(elements, usize::max) as f32;
            let share = (LARGEST_SUM / terms).log2().floor().exp2();
            let gradient = given(elements).cast(FloatDType::F32) * share.clamp(SMALLEST, 1.0);
            let gradients = (result * gradient).sum().backward();
            for leaf in leaves {
                found.push(leaf.grad(&gradients)?.cast(FloatDType::F32));
            }
        }
        Some(found.into_iter().map(Tensor::without_autodiff).collect())
    }
}

/// F32 numbers from ½ to 1 that look random and are the same each time.
fn positive(elements: usize, device: &Device) -> Tensor<1> {
    let noise = noise(Shape::new([elements]), device.as_dispatch());
    Tensor::from_dispatch(noise) * 0.25 + 0.75
}

/// Makes up operands as they are asked for.
struct Trial<F> {
    device: DispatchDevice,
    leaves: Vec<Tensor<1>>,
    result: Option<DispatchTensor>,
    /// A tensor of so many elements.
    leaf: F,
}

impl<F: Fn(usize) -> Tensor<1>> Operands for Trial<F> {
    fn float(&mut self, tensor: &TensorIr) -> DispatchTensor {
        let leaf = (self.leaf)(tensor.shape.num_elements());
        self.leaves.push(leaf.clone());
        Dispatch::float_reshape(leaf.into_dispatch(), tensor.shape.clone())
    }

    fn set(&mut self, _tensor: &TensorIr, value: DispatchTensor) {
        self.result = Some(value);
    }

    fn device(&self) -> DispatchDevice {
        self.device.clone()
    }
}
