//! The backends whose tensors lie in the host's memory.

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, TensorData};

use crate::fake::host::{Steps, range};
use crate::fake::kernel::{Kernel, LearnedGradients, Rule, Wanted};
use crate::format::groups::Groups;

/// A backend whose F32 tensors can be read in place.
trait InMemory: Backend {
    /// Calls `read` with the elements in row-major order; they are copied only if they do not lie
    /// in memory so.
    fn with_slice<R>(tensor: &FloatTensor<Self>, read: impl FnOnce(&[f32]) -> R) -> R;

    /// Calls `change` with the elements in row-major order, where they lie in memory so and nobody
    /// else holds them; gives the tensor back as it was elsewhere.
    fn changed(
        tensor: FloatTensor<Self>,
        change: impl FnOnce(&mut [f32]),
    ) -> Result<FloatTensor<Self>, FloatTensor<Self>>;
}

fn tensor<B: Backend>(values: Vec<f32>, shape: Shape, device: &B::Device) -> FloatTensor<B> {
    B::float_from_data(TensorData::new(values, shape), device)
}

fn steps<B: InMemory>(scale: &FloatTensor<B>, zero_point: &FloatTensor<B>, rule: &Rule) -> Steps {
    B::with_slice(scale, |scale| {
        B::with_slice(zero_point, |zero| Steps::new(rule, scale, zero))
    })
}

impl<B: InMemory> Kernel for B {
    fn quantize_dequantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> FloatTensor<Self> {
        let steps = steps::<Self>(&scale, &zero_point, rule);
        let runs = rule.groups.runs();
        Self::changed(x, |x| steps.quantize(x, runs)).unwrap_or_else(|x| {
            let mut y = Self::with_slice(&x, <[f32]>::to_vec);
            steps.quantize(&mut y, runs);
            tensor::<Self>(y, x.shape(), &x.device())
        })
    }

    fn quantize_dequantize_masked(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> (FloatTensor<Self>, BoolTensor<Self>) {
        let steps = steps::<Self>(&scale, &zero_point, rule);
        let (y, clipped) = Self::with_slice(&x, |x| steps.quantize_masked(x, rule.groups.runs()));
        let clipped = TensorData::new(clipped, x.shape());
        (
            tensor::<Self>(y, x.shape(), &x.device()),
            Self::bool_from_data(clipped, &x.device()),
        )
    }

    fn learned_gradients(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        rule: &Rule,
        wanted: Wanted,
    ) -> LearnedGradients<FloatTensor<Self>> {
        let steps = steps::<Self>(&scale, &zero_point, rule);
        let gradients = Self::with_slice(&x, |x| {
            Self::with_slice(&dy, |dy| steps.gradients(x, dy, rule.groups.runs(), wanted))
        });
        let device = x.device();
        let of_groups = |sums: Vec<f64>| {
            let sums = sums.into_iter().map(|sum| sum as f32).collect();
            tensor::<Self>(sums, scale.shape(), &device)
        };
        LearnedGradients {
            x: tensor::<Self>(gradients.x, x.shape(), &device),
            scale: of_groups(gradients.scale),
            zero_point: wanted.zero_point.then(|| of_groups(gradients.zero_point)),
        }
    }

    fn range(x: FloatTensor<Self>, groups: &Groups) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (min, max) = Self::with_slice(&x, |x| range(x, groups));
        let counts = Shape::from([groups.count()]);
        (
            tensor::<Self>(min, counts.clone(), &x.device()),
            tensor::<Self>(max, counts, &x.device()),
        )
    }
}

#[cfg(feature = "flex")]
impl InMemory for burn::backend::Flex {
    fn with_slice<R>(tensor: &FloatTensor<Self>, read: impl FnOnce(&[f32]) -> R) -> R {
        match tensor.as_slice() {
            Some(slice) => read(slice),
            None => read(tensor.to_contiguous().as_slice().expect("it is F32")),
        }
    }

    fn changed(
        mut tensor: FloatTensor<Self>,
        change: impl FnOnce(&mut [f32]),
    ) -> Result<FloatTensor<Self>, FloatTensor<Self>> {
        let Some((start, end)) = tensor.layout().contiguous_offsets() else {
            return Err(tensor);
        };
        match tensor.try_storage_mut() {
            Some(elements) => change(&mut elements[start..end]),
            None => return Err(tensor),
        }
        Ok(tensor)
    }
}

#[cfg(feature = "ndarray")]
impl InMemory for burn::backend::NdArray {
    fn with_slice<R>(tensor: &FloatTensor<Self>, read: impl FnOnce(&[f32]) -> R) -> R {
        let burn::backend::ndarray::NdArrayTensor::F32(storage) = tensor else {
            unreachable!("it was cast to F32");
        };
        let view = storage.view();
        match view.as_slice() {
            Some(slice) => read(slice),
            None => read(&view.iter().copied().collect::<Vec<f32>>()),
        }
    }

    fn changed(
        tensor: FloatTensor<Self>,
        _: impl FnOnce(&mut [f32]),
    ) -> Result<FloatTensor<Self>, FloatTensor<Self>> {
        Err(tensor)
    }
}
