//! How a quantized tensor is held by Burn.
//!
//! Burn's quantized tensors are symmetric, have one scale for the tensor or one for each block of
//! at most 255 along each of at most five axes, and no channels. A channel is therefore spelled as
//! blocks, with its scale repeated: a weight `[512, 10]` with a scale for each of its 10 columns
//! becomes blocks of `[128, 1]` with 40 scales.
//!
//! Codes go to the device as they are, through Burn's own layout of quantized data. Quantizing
//! there would round ties in another way on each backend. What the device then gives back is
//! compared with what was meant, bit by bit.

mod layout;

use burn::backend::{Backend, Dispatch};
use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue, ScaleDtype};
use burn::tensor::{DType, Device, Tensor};
use burn_lean_reparam::catch_quietly;

use layout::{Levels, little_endian_words, swapped};

use crate::codes::quantized_tensor::unpack;
use crate::format::groups::Groups;
use crate::module::resident::on_host;
use crate::{
    Granularity, Mapping, NumberFormat, QuantError, QuantizedTensor, Scheme, format::ScaleFormat,
};

impl QuantizedTensor {
    /// As a quantized tensor of Burn on `device`, whose values are bit for bit those of
    /// [`dequantize`](Self::dequantize).
    ///
    /// Codes of 3 bits are held in 4, those of 5 to 7 in 8; those of 2 and 4 in 8 where the device
    /// has nothing smaller.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedStorage`] when Burn cannot hold the tensor (an affine scheme,
    /// unsigned integers, scales that are not F32, blocks that do not come out smaller than F32)
    /// or the device cannot: a dtype it lacks, a shape it cannot pack (a GPU needs an axis along
    /// which words of 32 bits hold codes of one scale each: for a convolution with a scale for each
    /// output channel, four input channels at 8 bits), or values that it gives back wrong.
    pub fn to_burn<const D: usize>(&self, device: &Device) -> Result<Tensor<D>, QuantError> {
        let value = self.value_type()?;
        let levels = self.levels()?;
        let expected = self
            .dequantize::<D>(device)?
            .try_into_data()
            .map_err(QuantError::device)?;
        let mut refusals = Vec::new();
        for value in wider(value) {
            let stores = stores(device, value, self.shape());
            if !on_host(device) && !stores.iter().any(is_packed) {
                refusals.push(format!(
                    "no axis of {:?} is a multiple of the {} codes in a 32-bit word",
                    self.shape(),
                    32 / value.size_bits()
                ));
            }
            for store in stores {
                let scheme = levels.scheme(value, store);
                if let Some(axis) = self.axis_with_mixed_words(value, store)? {
                    refusals.push(format!(
                        "a word of {} codes along axis {axis} would need several scales",
                        32 / value.size_bits()
                    ));
                    continue;
                }
                if !can_hold(device, scheme) {
                    refusals.push(format!("{value:?} {store:?} is not among its dtypes"));
                    continue;
                }
                let data = levels.lay_out(self, scheme);
                let dtype = DType::QFloat(scheme);
                let tensor = Tensor::<D>::from_data(data, (device, dtype));
                let found = tensor
                    .clone()
                    .dequantize()
                    .try_into_data()
                    .map_err(QuantError::device)?;
                if found.iter::<f32>().eq(expected.iter::<f32>()) {
                    return Ok(tensor);
                }
                refusals.push(format!("{value:?} {store:?} comes back with other values"));
            }
        }
        Err(self.unsupported(format!("{device:?}: {}", refusals.join("; "))))
    }

    /// The codes and scales of a quantized tensor of Burn that
    /// [`to_burn`](Self::to_burn) made of a tensor of this scheme, also after it went through a
    /// record. Reads from the device.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedStorage`] for a tensor that is not quantized or in another store,
    /// [`QuantError::ForeignScheme`] when its blocks or codes are not those of `scheme`,
    /// [`QuantError::Device`].
    pub fn from_burn<const D: usize>(
        tensor: Tensor<D>,
        scheme: &Scheme,
    ) -> Result<Self, QuantError> {
        let shape = tensor.dims().to_vec();
        let unsupported = |reason: &str| QuantError::UnsupportedStorage {
            scheme: scheme.to_string(),
            shape: shape.clone(),
            reason: reason.into(),
        };
        let DType::QFloat(stored) = tensor.dtype() else {
            return Err(unsupported("it is not quantized"));
        };
        let last = shape.len().saturating_sub(1);
        let (bits, packed_axis) = match stored.store {
            QuantStore::Native => (8, last),
            QuantStore::PackedU32(from_last) if from_last <= last => {
                (stored.value.size_bits(), last - from_last)
            }
            _ => return Err(unsupported("it is in a store that is not known here")),
        };
        // Burn panics in a debug build where some numbers of bytes come back from a GPU.
        let data = catch_quietly(|| tensor.try_into_data()).map_err(QuantError::device)?;
        let data = data.map_err(QuantError::device)?;
        let bytes = data.into_bytes();
        let elements: usize = shape.iter().product();
        let blocks = match stored.block_size() {
            None => vec![1; shape.len()],
            Some(block) => block.num_blocks(&shape),
        };
        let scale_count: usize = blocks.iter().product();
        let foreign = || QuantError::ForeignScheme {
            expected: scheme.to_string(),
            found: format!(
                "a quantized tensor of {:?} with {scale_count} scales",
                stored.value
            ),
        };
        let scale_bytes = 4 * scale_count;
        if stored.scale_dtype() != ScaleDtype::F32
            || stored.num_levels() != 1
            || bytes.len() != elements * bits / 8 + scale_bytes
        {
            return Err(foreign());
        }
        let (codes, scales) = bytes.split_at(bytes.len() - scale_bytes);
        let signed = scheme.format.is_int();
        let codes = unpack(
            &little_endian_words(codes, bits),
            bits as u8,
            signed,
            elements,
        );
        let codes = codes.ok_or_else(foreign)?;
        let scales: Vec<f32> = scales
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_ne_bytes(*bytes))
            .collect();
        // As they were laid out: with the packed axis last. Swapping twice is the identity.
        let stored_order = |shape: &[usize]| {
            let mut order = shape.to_vec();
            order.swap(packed_axis, last);
            order
        };
        let codes = swapped(&codes, &stored_order(&shape), packed_axis);
        let scales = match stored.block_size() {
            None => scales,
            Some(_) => swapped(&scales, &stored_order(&blocks), packed_axis),
        };
        // The scale of a group is that of each of its blocks.
        let groups = Groups::new(&scheme.granularity, &shape)?;
        let extents: Vec<usize> = shape.iter().zip(&blocks).map(|(len, n)| len / n).collect();
        let divides = |(common, extent): (usize, &usize)| common.is_multiple_of(*extent);
        let is_held_whole = stored.block_size().is_none();
        if !is_held_whole
            && !groups
                .common_extents()
                .into_iter()
                .zip(&extents)
                .all(divides)
        {
            return Err(foreign());
        }
        let mut of_group = vec![None; groups.count()];
        for (block, scale) in scales.iter().enumerate() {
            let group = groups.of_element(first_element(block, &blocks, &extents, &shape));
            if *of_group[group].get_or_insert(*scale) != *scale {
                return Err(foreign());
            }
        }
        let scale: Vec<f32> = of_group.into_iter().flatten().collect();
        let zero_point = vec![0.0; scale.len()];
        Self::new(codes, shape, scale, zero_point, scheme.clone()).map_err(|_| foreign())
    }

    /// Whether Burn's blocks are all that stands against a quantized tensor of Burn.
    pub(crate) fn has_no_blocks(&self) -> bool {
        let is_integer = self.scheme().format.is_int();
        is_integer && self.value_type().is_ok() && self.levels().is_err()
    }

    /// The smallest type of Burn that holds the codes.
    fn value_type(&self) -> Result<QuantValue, QuantError> {
        let scheme = self.scheme();
        if scheme.mapping == Mapping::Affine {
            return Err(self.unsupported(
                "Burn's quantized tensors have no zero point; use a symmetric scheme for weights",
            ));
        }
        if scheme.scale_format != ScaleFormat::F32 {
            return Err(self.unsupported("only F32 scales are converted"));
        }
        Ok(match scheme.format {
            NumberFormat::Int { signed: false, .. } => {
                return Err(self.unsupported(
                    "Burn has no unsigned quantized integers; use signed ones for weights",
                ));
            }
            NumberFormat::Int {
                bits, narrow_range, ..
            } => match (bits, narrow_range) {
                (2, true) => QuantValue::Q2S,
                (2, false) => QuantValue::Q2F,
                (3, _) | (4, true) => QuantValue::Q4S,
                (4, false) => QuantValue::Q4F,
                (8, false) => QuantValue::Q8F,
                _ => QuantValue::Q8S,
            },
            NumberFormat::E4M3 => QuantValue::E4M3,
            NumberFormat::E5M2 => QuantValue::E5M2,
            NumberFormat::E2M1 => QuantValue::E2M1,
        })
    }

    fn levels(&self) -> Result<Levels, QuantError> {
        if *self.granularity() == Granularity::PerTensor {
            return Ok(Levels { blocks: None });
        }
        let rank = self.shape().len();
        if rank > MAX_RANK {
            return Err(self.unsupported("Burn's blocks have at most five axes"));
        }
        let common = self.groups()?.common_extents();
        let blocks: Vec<u8> = common.into_iter().map(largest_divisor).collect();
        let elements: usize = self.shape().iter().product();
        let per_block: usize = blocks.iter().map(|extent| usize::from(*extent)).product();
        let bits = usize::from(self.scheme().format.bits());
        let bytes = (elements * bits).div_ceil(8) + 4 * elements / per_block.max(1);
        if bytes >= 4 * elements {
            return Err(self.unsupported(format!(
                "the largest blocks of at most 255 that divide its groups are {blocks:?}: with a \
                 scale for each, it would be no smaller than in F32. Choose another granularity"
            )));
        }
        Ok(Levels {
            blocks: Some(blocks),
        })
    }

    /// The axis along which `store` packs words, if some of them would hold codes of several
    /// groups: Burn reads one scale for each word.
    fn axis_with_mixed_words(
        &self,
        value: QuantValue,
        store: QuantStore,
    ) -> Result<Option<usize>, QuantError> {
        let QuantStore::PackedU32(from_last) = store else {
            return Ok(None);
        };
        let axis = self.shape().len() - 1 - from_last;
        let groups = self.groups()?;
        let fits = groups.common_extents()[axis].is_multiple_of(32 / value.size_bits());
        Ok((groups.shape()[axis] > 1 && !fits).then_some(axis))
    }

    fn granularity(&self) -> &Granularity {
        &self.scheme().granularity
    }

    fn unsupported(&self, reason: impl Into<String>) -> QuantError {
        QuantError::UnsupportedStorage {
            scheme: self.scheme().to_string(),
            shape: self.shape().to_vec(),
            reason: reason.into(),
        }
    }
}

/// Row-major index of the first element of a block, in a grid of blocks of these extents.
fn first_element(mut block: usize, grid: &[usize], extents: &[usize], shape: &[usize]) -> usize {
    let (mut index, mut stride) = (0, 1);
    for axis in (0..grid.len()).rev() {
        index += block % grid[axis] * extents[axis] * stride;
        block /= grid[axis];
        stride *= shape[axis];
    }
    index
}

/// Axes of Burn's `BlockSize`.
const MAX_RANK: usize = 5;

/// The largest divisor that Burn's block extents can hold.
fn largest_divisor(len: usize) -> u8 {
    (1..=u8::MAX)
        .rev()
        .find(|divisor| len.is_multiple_of(usize::from(*divisor)))
        .unwrap_or(1)
}

/// `value`, and the 8-bit type that holds the same integers.
fn wider(value: QuantValue) -> Vec<QuantValue> {
    match value {
        QuantValue::Q2F | QuantValue::Q2S | QuantValue::Q4F | QuantValue::Q4S => {
            vec![value, QuantValue::Q8S]
        }
        _ => vec![value],
    }
}

/// Stores to try, best first.
fn stores(device: &Device, value: QuantValue, shape: &[usize]) -> Vec<QuantStore> {
    if on_host(device) {
        return vec![QuantStore::Native];
    }
    let per_word = 32 / value.size_bits();
    let packed = (0..shape.len())
        .filter(|from_last| shape[shape.len() - 1 - from_last].is_multiple_of(per_word))
        .map(QuantStore::PackedU32);
    // Of the types below a byte, GPU backends have no native store.
    let native = (value.size_bits() == 8).then_some(QuantStore::Native);
    packed.chain(native).collect()
}

fn is_packed(store: &QuantStore) -> bool {
    matches!(store, QuantStore::PackedU32(_))
}

/// Whether the device says that it can keep such tensors.
fn can_hold(device: &Device, scheme: QuantScheme) -> bool {
    let usage = Dispatch::dtype_usage(device.as_dispatch(), DType::QFloat(scheme));
    usage.contains(burn::backend::DTypeUsage::Storage)
        || device.supports_dtype(DType::QFloat(scheme))
}
