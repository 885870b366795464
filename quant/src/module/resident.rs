//! What is computed once from a converted weight: its values, or its codes in the form in which a CPU multiplies by them.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::tensor::quantization::QuantStore;
use burn::tensor::{Device, Tensor};
use burn_lean_reparam::reductions;
use serde::{Deserialize, Serialize};

use crate::module::listen::listener::lock;

/// When the float values of a converted weight are computed.
///
/// Burn's layers multiply floats, so that something has to turn codes into them. Once is as fast as
/// the float model; at every use is slow (a layer's whole weight for each batch, also for one
/// sample), but keeps no floats. The matrix product of some GPUs reads codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Dequantize {
    /// At the first use. They stay in memory beside the codes.
    #[default]
    Once,
    /// At every use. Only the codes stay in memory.
    EveryUse,
    /// Not at all where a product reads codes. Each weight's product is looked at when it is
    /// converted or loaded, with 1, 8 and 64 rows: it must be as exact as a product of floats and, which is measured
    /// once for each shape, not slower than that is, with the rounding of its input where a kernel rounds it, too (on a
    /// CPU with as much memory read in between as the rest of the model has). All other weights are dequantized once,
    /// and the report says why ([`ConvertedWeight::why_once`](crate::deploy::ConvertedWeight::why_once)).
    ///
    /// - On a GPU, Burn's own product: a [`Linear`](burn::nn::Linear) gives it the codes, and only they stay in
    ///   memory.
    /// - On flex and ndarray (feature `kernels`, which `engine` of `burn-lean` has), a kernel: a `Linear`,
    ///   [`Conv1d`](burn::nn::conv::Conv1d) or [`Conv2d`](burn::nn::conv::Conv2d) of a prepared model that is called by
    ///   [`forward_q`](crate::ForwardQ::forward_q) multiplies F32 by the packed codes, which stay in memory beside Burn's;
    ///   where its input is rounded to integers, with one scale or, in a linear layer, one for each row, it multiplies
    ///   integers, whose sums are exact. Integers of at most 8 bits, scales for the tensor, its output channels or equal
    ///   blocks. Stride, padding, dilation and groups of a convolution are not seen with its weight, and change no sum of
    ///   a window: windows are looked at without them, of one group and, where each output has one channel, also as
    ///   those of a depthwise convolution, which is multiplied in integers alone. Its time is measured with images of
    ///   which it makes 1, 8 × 8 and 32 × 32 outputs (along one axis 1, 64 and 1024), fewer of a large one and of one
    ///   group: an image that is much larger, or many groups, may be slower. It takes milliseconds for each shape, some
    ///   tenths of a second in a model beyond the caches. Called by its plain `forward`, the layer
    ///   dequantizes once, and keeps the values, too. The gates of recurrent layers are such layers.
    ///
    /// That was seen on this device: a model that moves to another one, or a record that is loaded by
    /// Burn, dequantizes once. So does a [recorded](crate::QuantizedForward) forward pass, which computes
    /// with values.
    InProduct,
}

impl fmt::Display for Dequantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Once => "dequantized once",
            Self::EveryUse => "dequantized at every use",
            Self::InProduct => "codes in the product",
        })
    }
}

/// Whether a device's tensors lie in the host's memory. The default of a backend tells its kind: the CPU backends
/// hold everything in bytes.
pub(crate) fn on_host(device: &Device) -> bool {
    device.settings().quantization.scheme.store == QuantStore::Native
}

/// The values of a weight and its packed codes, once they are computed. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Resident {
    values: Arc<Mutex<Option<Values>>>,
    #[cfg(feature = "kernels")]
    packed: Arc<Mutex<Option<Packed>>>,
}

/// Codes in whatever form they are multiplied in.
#[cfg(feature = "kernels")]
type Packed = Arc<dyn Any + Send + Sync>;

enum Values {
    /// They are those that are stored.
    Stored,
    /// A `Tensor<D>`, of whatever rank.
    Computed(Box<dyn Any + Send>),
}

impl Resident {
    /// What `compute` makes of `stored`, or made of it before.
    ///
    /// The values of a weight that is stored as floats and already on its grid are not kept twice;
    /// finding out reads from the device, once.
    pub(crate) fn values<const D: usize>(
        &self,
        stored: Tensor<D>,
        compute: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        if let Some(known) = self.known(&stored) {
            return known;
        }
        // Not under the lock: a thread of rayon's pool that waits for its share may begin another use.
        let computed = compute(stored.clone());
        let is_stored = stored.dtype() == computed.dtype()
            && reductions::all(stored.clone().equal(computed.clone())).into_scalar::<bool>();
        let (values, known) = match is_stored {
            true => (stored, Values::Stored),
            false => (computed.clone(), Values::Computed(Box::new(computed))),
        };
        *lock(&self.values) = Some(known);
        values
    }

    /// What was made of `stored` before.
    fn known<const D: usize>(&self, stored: &Tensor<D>) -> Option<Tensor<D>> {
        match lock(&self.values).as_ref()? {
            Values::Stored => Some(stored.clone()),
            Values::Computed(computed) => computed.downcast_ref::<Tensor<D>>().cloned(),
        }
    }
}

#[cfg(feature = "kernels")]
impl Resident {
    /// What was made of the codes before, where that `fits`, or what `pack` makes of them.
    pub(crate) fn packed<T: Any + Send + Sync>(
        &self,
        fits: impl FnOnce(&T) -> bool,
        pack: impl FnOnce() -> T,
    ) -> Arc<T> {
        let known = lock(&self.packed).clone();
        let known = known.and_then(|known| known.downcast::<T>().ok());
        if let Some(known) = known.filter(|known| fits(known)) {
            return known;
        }
        // Not under the lock, which other threads of the pool may wait for.
        let packed = Arc::new(pack());
        *lock(&self.packed) = Some(packed.clone());
        packed
    }
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resident")
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_use_may_begin_while_another_computes() {
        let resident = Resident::default();
        let stored = || Tensor::<1>::from_floats([1.0, -2.0], &Device::flex());
        let values = |x: Tensor<1>| x.into_data().try_to_vec::<f32>().unwrap();
        let found = resident.values(stored(), |x| {
            let other = resident.values(stored(), |x| x * 2.0);
            assert_eq!(values(other), [2.0, -4.0]);
            x * 2.0
        });
        assert_eq!(values(found), [2.0, -4.0]);
        let again = resident.values(stored(), |_| panic!("they are known"));
        assert_eq!(values(again), [2.0, -4.0]);
    }
}
