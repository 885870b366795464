//! The elements of one tensor without its zeros.
//!
//! Works on bytes, so that it is exact for every dtype: an element is left out if all of its bits
//! are zero. A kept -0.0 has a bit set and is stored; a kept +0.0 is left out and comes back as
//! what it was. Elements of less than a byte come one in each byte and are stored packed.

use serde::{Deserialize, Serialize};

use burn_lean_reparam::bits::{pack, packed_len, unpack};

use crate::host::bits;

/// How the places of nonzero elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Encoding {
    /// All elements, zeros too.
    Dense,
    /// One bit per element, then the nonzero elements.
    Bitmask,
    /// For each nonzero element the number of zeros before it, in base 128 (one byte below 128),
    /// then the nonzero elements. Column indices of a compressed sparse row, in their differences:
    /// smaller than a bitmask from about 7 of 8 zeros on.
    Gaps,
}

/// How to read encoded bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) encoding: Encoding,
    pub(crate) nonzeros: usize,
    /// The nonzero elements are all the same and stored once, like those of a mask.
    pub(crate) uniform: bool,
}

/// The size of an element.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Width {
    Bytes(usize),
    /// 1, 2 or 4, in the low bits of a byte each.
    Bits(u8),
}

impl Width {
    /// Of 8 bits or more, or of less.
    pub(crate) fn of_bits(bits: usize) -> Self {
        match bits {
            ..8 => Self::Bits(bits as u8),
            _ => Self::Bytes(bits / 8),
        }
    }

    /// Bytes of an element where it is not packed.
    fn bytes(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Bits(_) => 1,
        }
    }

    /// Bytes that so many elements are stored in.
    fn stored(self, count: usize) -> usize {
        match self {
            Self::Bytes(bytes) => count * bytes,
            Self::Bits(bits) => packed_len(count, bits),
        }
    }

    /// Elements as they are stored.
    pub(crate) fn pack(self, elements: &[u8]) -> Vec<u8> {
        match self {
            Self::Bytes(_) => elements.to_vec(),
            Self::Bits(bits) => pack(elements.iter().copied(), bits),
        }
    }

    /// The first `count` of stored elements, of which there are no fewer.
    pub(crate) fn unpack(self, stored: &[u8], count: usize) -> Vec<u8> {
        match self {
            Self::Bytes(_) => stored.to_vec(),
            Self::Bits(bits) => unpack(&stored[..packed_len(count, bits)], bits, count)
                .expect("as many bytes as so many elements take"),
        }
    }
}

/// Encodes elements in the way that takes the fewest bytes; the simpler one on a tie.
pub(crate) fn encode(bytes: &[u8], size: Width) -> (Layout, Vec<u8>) {
    let width = size.bytes();
    let elements = || bytes.chunks_exact(width);
    let places: Vec<usize> = elements()
        .enumerate()
        .filter(|(_, element)| element.iter().any(|byte| *byte != 0))
        .map(|(place, _)| place)
        .collect();
    let element = |place: &usize| &bytes[place * width..][..width];
    let uniform = places.len() > 1 && places.iter().all(|at| element(at) == element(&places[0]));
    let mut gaps = Vec::new();
    let mut next = 0;
    for place in &places {
        push_base128(&mut gaps, place - next);
        next = place + 1;
    }
    let count = bytes.len() / width;
    let stored = if uniform { 1 } else { places.len() };
    let sizes = [
        (Encoding::Dense, size.stored(count)),
        (
            Encoding::Bitmask,
            packed_len(count, 1) + size.stored(stored),
        ),
        (Encoding::Gaps, gaps.len() + size.stored(stored)),
    ];
    let encoding = sizes
        .into_iter()
        .min_by_key(|(_, size)| *size)
        .map_or(Encoding::Dense, |(encoding, _)| encoding);
    let mut encoded = match encoding {
        Encoding::Dense => size.pack(bytes),
        Encoding::Bitmask => bits::pack(elements().map(|one| one.iter().any(|byte| *byte != 0))),
        Encoding::Gaps => gaps,
    };
    if encoding != Encoding::Dense {
        let values: Vec<u8> = places[..stored].iter().flat_map(element).copied().collect();
        encoded.extend(size.pack(&values));
    }
    let layout = Layout {
        encoding,
        nonzeros: places.len(),
        uniform: uniform && encoding != Encoding::Dense,
    };
    (layout, encoded)
}

/// Decodes what [`encode`] made of `count` elements, or says what is wrong.
pub(crate) fn decode(
    layout: &Layout,
    encoded: &[u8],
    count: usize,
    size: Width,
) -> Result<Vec<u8>, String> {
    let width = size.bytes();
    // Also in bits.
    let addressed = count.checked_mul(width.max(8));
    addressed.ok_or("it has more bytes than can be addressed")?;
    let length = count * width;
    if layout.encoding == Encoding::Dense {
        let expected = size.stored(count);
        return match encoded.len() == expected {
            true => Ok(size.unpack(encoded, count)),
            false => Err(format!("it has {} of {expected} bytes", encoded.len())),
        };
    }
    if layout.nonzeros > count {
        return Err(format!(
            "{} of {count} elements are nonzero",
            layout.nonzeros
        ));
    }
    // No more than all of them.
    let stored = if layout.uniform { 1 } else { layout.nonzeros };
    let Some(split) = encoded.len().checked_sub(size.stored(stored)) else {
        return Err(format!(
            "it has too few bytes for {stored} nonzero elements"
        ));
    };
    let (places, values) = encoded.split_at(split);
    let values = size.unpack(values, stored);
    let places = match layout.encoding {
        Encoding::Gaps => from_gaps(places, count)?,
        _ => {
            let flags = bits::unpack(places, count).ok_or("its bitmask has the wrong length")?;
            (0..count).filter(|place| flags[*place]).collect()
        }
    };
    if places.len() != layout.nonzeros {
        return Err(format!(
            "{} places are marked for {} nonzero elements",
            places.len(),
            layout.nonzeros
        ));
    }
    let mut bytes = vec![0; length];
    for (at, place) in places.into_iter().enumerate() {
        let value = if layout.uniform { 0 } else { at };
        bytes[place * width..][..width].copy_from_slice(&values[value * width..][..width]);
    }
    Ok(bytes)
}

/// Seven bits to a byte, the lowest first; the eighth says that more follow.
fn push_base128(bytes: &mut Vec<u8>, mut number: usize) {
    while number >= 128 {
        bytes.push(number as u8 & 127 | 128);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// The places that gaps lead to, all below `count`.
fn from_gaps(bytes: &[u8], count: usize) -> Result<Vec<usize>, String> {
    let mut places = Vec::new();
    let (mut next, mut gap, mut shift) = (0usize, 0usize, 0);
    for byte in bytes {
        let digit = usize::from(byte & 127);
        gap |= digit
            .checked_shl(shift)
            .filter(|shifted| shifted >> shift == digit)
            .ok_or("a gap is too large")?;
        shift += 7;
        if byte & 128 == 0 {
            let place = next.checked_add(gap).filter(|place| *place < count);
            let place = place.ok_or("a gap leads beyond the last element")?;
            places.push(place);
            (next, gap, shift) = (place + 1, 0, 0);
        }
    }
    match shift {
        0 => Ok(places),
        _ => Err("its last gap is cut off".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(bytes: &[u8], nonzeros: usize, count: usize) -> Result<Vec<u8>, String> {
        let layout = Layout {
            encoding: Encoding::Gaps,
            nonzeros,
            uniform: false,
        };
        decode(&layout, bytes, count, Width::Bytes(1))
    }

    #[test]
    fn gaps_of_every_length_come_back() {
        for gap in [0, 1, 127, 128, 16_383, 16_384, 300_000] {
            let mut bytes = vec![0u8; gap + 2];
            (bytes[gap], bytes[gap + 1]) = (7, 9);
            let one = Width::Bytes(1);
            let (layout, encoded) = encode(&bytes, one);
            assert_eq!(decode(&layout, &encoded, bytes.len(), one), Ok(bytes));
        }
    }

    #[test]
    fn damaged_gaps_are_refused() {
        assert_eq!(gaps(&[1, 0, 5, 6], 2, 3), Ok(vec![0, 5, 6]));
        // Beyond the last element, cut off, larger than any number, fewer than announced.
        assert!(gaps(&[1, 1, 5, 6], 2, 3).is_err());
        assert!(gaps(&[128, 5], 1, 300).is_err());
        assert!(gaps(&[[255; 10].as_slice(), &[1, 5]].concat(), 1, 300).is_err());
        assert!(gaps(&[1, 5, 6], 2, 3).is_err());
        assert!(gaps(&[], 4, 3).is_err());
    }

    #[test]
    fn the_encoding_changes_where_gaps_become_smaller() {
        let every = |step: usize| {
            let bytes: Vec<u8> = (0..800)
                .map(|at| u8::from(at % step == 0) * (1 + at as u8 % 9))
                .collect();
            encode(&bytes, Width::Bytes(1)).0.encoding
        };
        assert_eq!(every(1), Encoding::Dense);
        assert_eq!(every(2), Encoding::Bitmask);
        assert_eq!(every(7), Encoding::Bitmask);
        assert_eq!(every(9), Encoding::Gaps);
    }
    #[test]
    fn elements_of_less_than_a_byte_come_back_and_are_packed() {
        for bits in [1, 2, 4] {
            let width = Width::Bits(bits);
            for step in [1, 3, 40] {
                let most = (1usize << bits) - 1;
                let elements: Vec<u8> = (0..203)
                    .map(|at| {
                        if at % step == 0 {
                            (1 + at % most) as u8
                        } else {
                            0
                        }
                    })
                    .collect();
                let (layout, encoded) = encode(&elements, width);
                assert!(encoded.len() <= packed_len(203, bits));
                assert_eq!(decode(&layout, &encoded, 203, width), Ok(elements.clone()));
                assert_eq!(width.unpack(&width.pack(&elements), 203), elements);
                assert!(decode(&layout, &encoded[1..], 203, width).is_err());
            }
        }
    }
}
