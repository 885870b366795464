//! Tensors of any backend as constants on a device.

use burn::tensor::{Bool, Device, Int, Tensor};

use super::{TensorMapper, Tensors};

/// The tensors of a value on a device, which may be of another backend, and without autodiff.
///
/// Burn's `to_device` hands booleans to another backend as the first one stores them, which the other takes for
/// other values or refuses (`docs/upstream/bools-between-backends.md`); here they are made anew. Integers of a
/// dtype that the device lacks get its own.
///
/// ```
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_lean_graph::as_constants;
///
/// let device = Device::flex();
/// let x = Tensor::<1>::ones([2], &device.clone().autodiff());
/// let mask = Tensor::<1, Bool>::from_data([true, false], &device);
/// let (x, mask) = as_constants(&(x, mask), &device);
/// assert!(!x.is_autodiff());
/// assert_eq!(mask.into_data().try_to_vec::<bool>().unwrap(), [true, false]);
/// ```
///
/// # Panics
///
/// Where the device of a tensor fails to give its values.
pub fn as_constants<V: Tensors>(value: &V, device: &Device) -> V {
    value.map_tensors(&mut Constants {
        device: device.clone().without_autodiff(),
    })
}

struct Constants {
    device: Device,
}

impl TensorMapper for Constants {
    fn float<const D: usize>(&mut self, tensor: &Tensor<D>) -> Tensor<D> {
        let tensor = tensor.clone().without_autodiff();
        match tensor.device() == self.device {
            true => tensor,
            false => tensor.to_device(&self.device),
        }
    }

    fn int<const D: usize>(&mut self, tensor: &Tensor<D, Int>) -> Tensor<D, Int> {
        let tensor = tensor.clone().without_autodiff();
        if tensor.device() == self.device {
            return tensor;
        }
        let tensor = match self.device.supports_dtype(tensor.dtype()) {
            true => tensor,
            false => tensor.cast(self.device.settings().int_dtype),
        };
        tensor.to_device(&self.device)
    }

    fn bool<const D: usize>(&mut self, tensor: &Tensor<D, Bool>) -> Tensor<D, Bool> {
        let tensor = tensor.clone().without_autodiff();
        match tensor.device() == self.device {
            true => tensor,
            false => Tensor::from_data(tensor.into_data(), &self.device),
        }
    }
}
