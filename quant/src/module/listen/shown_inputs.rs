//! The inputs of a model's layers, as the execution of a recorded forward pass shows them.

use std::sync::{Arc, Mutex};

use burn::backend::ir::{ModuleOperationIr, OperationIr, TensorIr};
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use burn_lean_graph::hooks::{Hook, HookedAt};
use burn_lean_graph::{Kernel, Node, Role};

use crate::module::LayerInputs;
use crate::module::listen::layer_inputs::{LOOKED_UP, of_groups, parts};
use crate::module::listen::listener::lock;

/// Shows what the product with a weight multiplies it with, behind the layer's input quantizer.
pub(crate) struct ShownInputs {
    pub(crate) into: Arc<Mutex<LayerInputs>>,
    /// Path of the weight.
    pub(crate) weight: String,
}

impl Hook for ShownInputs {
    fn name(&self) -> &'static str {
        "layer_input"
    }

    fn role(&self) -> Option<(Role, usize)> {
        Some((Role::Input, 0))
    }

    fn takes_zeros(&self) -> bool {
        true
    }

    fn apply(&self, tensor: DispatchTensor, at: &HookedAt<'_>) -> Result<DispatchTensor, String> {
        let shown = at.node.operation().outputs().next();
        for reader in at.node.readers() {
            let operation = reader.operation();
            // Of the products that are collected, the weight is on the right.
            let is_left = operation.inputs().next().map(|left| left.id) == shown.map(|one| one.id);
            if is_left && reader.reads_table() {
                lock(&self.into).refuse(&self.weight, LOOKED_UP);
                continue;
            }
            let parts = match is_left {
                true => samples(tensor.clone(), operation),
                false => None,
            };
            match parts {
                Some(parts) => {
                    LayerInputs::observe(&self.into, &self.weight, summed_axis(&reader), parts);
                }
                // Of a sequence, which is shown as a whole, the products read views.
                None if reader.is_view() => {}
                None => lock(&self.into).note_other_product(&self.weight),
            }
        }
        Ok(tensor)
    }
}

/// The axis of the weight, as it lies in its parameter, over which a product adds up; `None` where something
/// else than views is between them.
fn summed_axis(product: &Node<'_>) -> Option<usize> {
    use ModuleOperationIr as Op;
    let operation = product.operation();
    let axis = match operation {
        OperationIr::Module(Op::Conv1d(_) | Op::Conv2d(_)) => 1,
        _ => {
            let weight = operation.inputs().nth(1)?;
            weight.shape.num_dims().checked_sub(2)?
        }
    };
    product.viewed(1, axis).map(|(_, axis)| axis)
}

/// What comes part by part: for each group of channels what each output sees.
type Parts = Box<dyn Iterator<Item = Vec<Tensor<2>>>>;

/// `None` for other operations than linear layers and convolutions of one and two axes.
fn samples(x: DispatchTensor, operation: &OperationIr) -> Option<Parts> {
    use ModuleOperationIr as Op;
    match operation {
        OperationIr::Float(..) | OperationIr::Module(Op::Linear(_)) => {
            let shape = x.shape();
            let features = *shape.as_slice().last()?;
            let rows = shape.num_elements() / features.max(1);
            let rows = [rows, features];
            let samples = match shape.num_dims() {
                1 => plain::<1>(x).reshape(rows),
                2 => plain::<2>(x),
                3 => plain::<3>(x).reshape(rows),
                4 => plain::<4>(x).reshape(rows),
                5 => plain::<5>(x).reshape(rows),
                _ => return None,
            };
            Some(Box::new(std::iter::once(vec![samples])))
        }
        OperationIr::Module(Op::Conv1d(op)) => {
            let o = &op.options;
            let kernel = kernel(&op.weight, &o.stride, &o.padding, &o.dilation);
            Some(all_patches(kernel, o.groups, &plain::<3>(x)))
        }
        OperationIr::Module(Op::Conv2d(op)) => {
            let o = &op.options;
            let kernel = kernel(&op.weight, &o.stride, &o.padding, &o.dilation);
            Some(all_patches(kernel, o.groups, &plain::<4>(x)))
        }
        _ => None,
    }
}

fn kernel(
    weight: &TensorIr,
    stride: &[usize],
    padding: &[(usize, usize)],
    dilation: &[usize],
) -> Kernel {
    Kernel {
        size: weight.shape.to_vec()[2..].to_vec(),
        stride: stride.to_vec(),
        padding: padding.to_vec(),
        dilation: dilation.to_vec(),
    }
}

fn all_patches<const D: usize>(kernel: Kernel, groups: usize, x: &Tensor<D>) -> Parts {
    let parts = parts(x, kernel.size.iter().product());
    Box::new(parts.map(move |x| of_groups(&kernel, groups, x)))
}

fn plain<const D: usize>(tensor: DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor).without_autodiff()
}
