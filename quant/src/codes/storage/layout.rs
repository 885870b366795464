//! The bytes of a quantized tensor as Burn reads them.

use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue, ScaleDtype};
use burn::tensor::{DType, TensorData};
use burn_lean_reparam::bits;

use crate::QuantizedTensor;
use crate::codes::storage::first_element;

/// Burn's scale levels: one for the tensor, or one for each block.
pub(super) struct Levels {
    pub(super) blocks: Option<Vec<u8>>,
}

impl Levels {
    pub(super) fn scheme(&self, value: QuantValue, store: QuantStore) -> QuantScheme {
        let scheme = QuantScheme::default().with_value(value).with_store(store);
        match &self.blocks {
            None => scheme.per_tensor(ScaleDtype::F32),
            Some(blocks) => scheme.per_block(blocks, ScaleDtype::F32),
        }
    }

    /// The bytes that Burn reads: values, then scales.
    ///
    /// Where another axis than the last is packed, both are stored with that axis swapped last.
    pub(super) fn lay_out(&self, tensor: &QuantizedTensor, scheme: QuantScheme) -> TensorData {
        let shape = tensor.shape();
        let last = shape.len().saturating_sub(1);
        let packed_axis = match scheme.store {
            QuantStore::PackedU32(from_last) => last - from_last,
            _ => last,
        };
        let codes = swapped(tensor.codes(), shape, packed_axis);
        let bytes = codes.iter().map(|code| *code as u8);
        let mut bytes: Vec<u8> = match scheme.store {
            QuantStore::PackedU32(_) => {
                let bits = scheme.value.size_bits();
                little_endian_words(&bits::pack(bytes, bits as u8), bits)
            }
            _ => bytes.collect(),
        };
        let scales = match &self.blocks {
            None => tensor.scale().to_vec(),
            Some(blocks) => {
                let grid: Vec<usize> = shape
                    .iter()
                    .zip(blocks)
                    .map(|(len, extent)| len / usize::from(*extent))
                    .collect();
                let of_block = block_scales(tensor, blocks, &grid);
                swapped(&of_block, &grid, packed_axis)
            }
        };
        bytes.extend(scales.iter().flat_map(|scale| scale.to_ne_bytes()));
        TensorData::from_bytes_vec(bytes, shape.to_vec(), DType::QFloat(scheme))
    }
}

/// The scale of each block: that of the group it is a part of.
fn block_scales(tensor: &QuantizedTensor, blocks: &[u8], grid: &[usize]) -> Vec<f32> {
    let extents: Vec<usize> = blocks.iter().map(|extent| usize::from(*extent)).collect();
    let of_elements = tensor.of_elements(tensor.scale());
    (0..grid.iter().product())
        .map(|block| of_elements[first_element(block, grid, &extents, tensor.shape())])
        .collect()
}

/// Row-major values with `axis` and the last axis swapped.
pub(super) fn swapped<T: Copy>(values: &[T], shape: &[usize], axis: usize) -> Vec<T> {
    let last = shape.len().saturating_sub(1);
    if axis == last {
        return values.to_vec();
    }
    let mut stored = shape.to_vec();
    stored.swap(axis, last);
    let strides: Vec<usize> = (0..shape.len())
        .map(|axis| shape[axis + 1..].iter().product())
        .collect();
    (0..values.len())
        .map(|mut index| {
            let mut source = 0;
            for position in (0..stored.len()).rev() {
                let coordinate = index % stored[position];
                index /= stored[position];
                let original = match position {
                    p if p == last => axis,
                    p if p == axis => last,
                    p => p,
                };
                source += coordinate * strides[original];
            }
            values[source]
        })
        .collect()
}

/// The bytes of 32-bit words in the order of their bits, whatever the machine's; and back.
pub(super) fn little_endian_words(bytes: &[u8], bits: usize) -> Vec<u8> {
    if bits == 8 || cfg!(target_endian = "little") {
        return bytes.to_vec();
    }
    let words = bytes.as_chunks::<4>().0.iter();
    words
        .flat_map(|word| u32::from_ne_bytes(*word).to_le_bytes())
        .collect()
}
