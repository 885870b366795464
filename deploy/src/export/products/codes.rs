//! Codes as bytes, and the values that they stand for.

use crate::ElementType;
use crate::export::weights::{Codes, Spread};

/// The values that codes stand for.
pub(super) fn dequantized(codes: &Codes) -> Vec<f32> {
    let shape = &codes.shape;
    let columns = shape.last().copied().unwrap_or(1);
    let value = |(index, code): (usize, &i16)| {
        let group = match &codes.scale {
            Spread::Tensor(_) => 0,
            Spread::Axis(axis, _) => {
                index / shape[axis + 1..].iter().product::<usize>() % shape[*axis]
            }
            Spread::Blocks(block, _) => index / columns / block * columns + index % columns,
            Spread::Within(block, _) => index / block,
        };
        let scale = match &codes.scale {
            Spread::Tensor(scale) => *scale,
            Spread::Axis(_, scales) | Spread::Blocks(_, scales) | Spread::Within(_, scales) => {
                scales[group]
            }
        };
        f32::from(code - codes.zero_point[group]) * scale
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
    match element {
        ElementType::I4 | ElementType::U4 => codes
            .chunks(2)
            .map(|pair| {
                (pair[0] & 15) as u8 | ((pair.get(1).copied().unwrap_or(0) & 15) << 4) as u8
            })
            .collect(),
        _ => codes.iter().map(|code| *code as u8).collect(),
    }
}
