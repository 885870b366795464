//! Codes as bytes, and the values that they stand for.

use burn_lean_reparam::bits;

use crate::ElementType;
use crate::export::weights::Codes;

/// The values that codes stand for.
pub(super) fn dequantized(codes: &Codes) -> Vec<f32> {
    let scales = codes.scale.scales();
    let value = |(index, code): (usize, &i16)| {
        let group = codes.group(index);
        f32::from(code - codes.zero_point[group]) * scales[group]
    };
    codes.codes.iter().enumerate().map(value).collect()
}

pub(super) fn code_type(codes: &Codes) -> ElementType {
    match (codes.bits <= 4, codes.signed) {
        (true, true) => ElementType::I4,
        (true, false) => ElementType::U4,
        (false, true) => ElementType::I8,
        (false, false) => ElementType::U8,
    }
}

/// Codes as bytes, those of 4 bits two in a byte, low half first.
pub(super) fn pack(codes: &[i16], element: ElementType) -> Vec<u8> {
    let bytes = codes.iter().map(|code| *code as u8);
    match element {
        ElementType::I4 | ElementType::U4 => bits::pack(bytes, 4),
        _ => bytes.collect(),
    }
}
