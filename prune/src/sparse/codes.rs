//! The bytes of a quantized tensor: codes, then scales.
//!
//! Burn writes codes one after the other, several to a word where they are small, and scales behind
//! them. A pruned weight has the code 0, so that codes are stored without their zeros, as elements of
//! other tensors are, and in 2 or 4 bits where all of them fit, also where Burn keeps each in a byte.
//! Nothing depends on which bytes are which: all of them come back.

use burn::tensor::Shape;
use burn::tensor::quantization::{
    QuantScheme, QuantStore, global_scale_size, params_shape, quantized_data_len, scale_size,
};
use burn_lean_reparam::catch_quietly;
use serde::{Deserialize, Serialize};

use super::encoding::{self, Layout, Width};

/// How the bytes of a quantized tensor are split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Codes {
    /// Bits of a code in the tensor.
    bits: usize,
    /// Bits of a code in the file, where they are fewer: the others repeat its sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stored_bits: Option<usize>,
    /// Codes, with those that fill up the last word.
    count: usize,
    /// Bytes of the scales, which are stored as they are.
    scales: usize,
}

impl Codes {
    /// Of `length` bytes; `None` where they are fewer than their scheme says.
    fn of(scheme: &QuantScheme, shape: &Shape, length: usize) -> Option<Self> {
        let scales = params_shape(shape, scheme).num_elements() * scale_size(scheme.scale_dtype());
        let scales = scales + global_scale_size(scheme);
        let bits = match scheme.store {
            QuantStore::Native => 8,
            QuantStore::PackedU32(_) | QuantStore::PackedNative(_) => scheme.value.size_bits(),
        };
        Some(Self {
            bits,
            stored_bits: None,
            count: length.checked_sub(scales)? * 8 / bits,
            scales,
        })
    }

    fn width(&self) -> Width {
        Width::of_bits(self.bits)
    }

    /// The width in the file.
    fn stored(&self) -> Width {
        Width::of_bits(self.stored_bits.unwrap_or(self.bits))
    }

    /// Bytes of the tensor.
    pub(crate) fn bytes(&self) -> usize {
        let codes = self.count.saturating_mul(self.bits) / 8;
        codes.saturating_add(self.scales)
    }
}

/// Fails where so many bytes are not those of a quantized tensor of this shape.
pub(crate) fn check_length(
    scheme: &QuantScheme,
    shape: &Shape,
    bytes: usize,
) -> Result<(), String> {
    // A scheme that does not fit its shape is none that Burn has a number for.
    let expected = catch_quietly(|| quantized_data_len(scheme, shape))?;
    match bytes == expected {
        true => Ok(()),
        false => Err(format!("it has {bytes} of {expected} bytes")),
    }
}

/// Encodes the bytes of a quantized tensor without its zeros.
pub(crate) fn encode(
    scheme: &QuantScheme,
    shape: &Shape,
    bytes: &[u8],
) -> Option<(Codes, Layout, Vec<u8>)> {
    let mut codes = Codes::of(scheme, shape, bytes.len()).filter(|codes| codes.bits <= 8)?;
    let (values, scales) = bytes.split_at(bytes.len() - codes.scales);
    let mut values = codes.width().unpack(values, codes.count);
    let fits = |bits: &usize| values.iter().all(|code| signed(*code, *bits) == *code);
    let fewer = [2, 4].into_iter().find(fits);
    if let (8, Some(fewer)) = (codes.bits, fewer) {
        codes.stored_bits = Some(fewer);
        values.iter_mut().for_each(|code| *code &= (1 << fewer) - 1);
    }
    let (layout, mut encoded) = encoding::encode(&values, codes.stored());
    encoded.extend(scales);
    Some((codes, layout, encoded))
}

/// The byte whose upper bits repeat the highest one of the lower `bits`.
fn signed(code: u8, bits: usize) -> u8 {
    ((code << (8 - bits)) as i8 >> (8 - bits)) as u8
}

/// The bytes that [`encode`] was given, or what is wrong.
pub(crate) fn decode(
    codes: &Codes,
    layout: &Layout,
    encoded: &[u8],
    scheme: &QuantScheme,
    shape: &Shape,
) -> Result<Vec<u8>, String> {
    check_length(scheme, shape, codes.bytes())?;
    let split = encoded.len().checked_sub(codes.scales);
    let sound = matches!(
        (codes.bits, codes.stored_bits),
        (1 | 2 | 4 | 8, None) | (8, Some(2 | 4))
    );
    let Some(split) = split.filter(|_| sound) else {
        return Err(format!(
            "{} codes of {} bits do not fit",
            codes.count, codes.bits
        ));
    };
    let (values, scales) = encoded.split_at(split);
    let mut values = encoding::decode(layout, values, codes.count, codes.stored())?;
    if let Some(bits) = codes.stored_bits {
        values
            .iter_mut()
            .for_each(|code| *code = signed(*code, bits));
    }
    let mut bytes = codes.width().pack(&values);
    bytes.extend(scales);
    Ok(bytes)
}
