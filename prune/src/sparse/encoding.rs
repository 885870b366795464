//! The elements of one tensor without its zeros.
//!
//! Works on bytes, so that it is exact for every dtype: an element is left out if all of its bits
//! are zero. A kept -0.0 has a bit set and is stored; a kept +0.0 is left out and comes back as
//! what it was.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bits;

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

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Dense => "dense",
            Self::Bitmask => "bitmask",
            Self::Gaps => "gaps",
        })
    }
}

/// How to read encoded bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) encoding: Encoding,
    pub(crate) nonzeros: usize,
    /// The nonzero elements are all the same and stored once, like those of a mask.
    pub(crate) uniform: bool,
}

/// Encodes elements of `width` bytes in the way that takes the fewest; the simpler one on a tie.
pub(crate) fn encode(bytes: &[u8], width: usize) -> (Layout, Vec<u8>) {
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
        (Encoding::Dense, bytes.len()),
        (Encoding::Bitmask, bits::packed_len(count) + stored * width),
        (Encoding::Gaps, gaps.len() + stored * width),
    ];
    let encoding = sizes
        .into_iter()
        .min_by_key(|(_, size)| *size)
        .map_or(Encoding::Dense, |(encoding, _)| encoding);
    let mut encoded = match encoding {
        Encoding::Dense => bytes.to_vec(),
        Encoding::Bitmask => bits::pack(elements().map(|one| one.iter().any(|byte| *byte != 0))),
        Encoding::Gaps => gaps,
    };
    if encoding != Encoding::Dense {
        places[..stored]
            .iter()
            .for_each(|place| encoded.extend(element(place)));
    }
    let layout = Layout {
        encoding,
        nonzeros: places.len(),
        uniform: uniform && encoding != Encoding::Dense,
    };
    (layout, encoded)
}

/// Decodes what [`encode`] made of `count` elements of `width` bytes, or says what is wrong.
pub(crate) fn decode(
    layout: &Layout,
    encoded: &[u8],
    count: usize,
    width: usize,
) -> Result<Vec<u8>, String> {
    let size = count
        .checked_mul(width)
        .ok_or("it has more bytes than can be addressed")?;
    if layout.encoding == Encoding::Dense {
        return match encoded.len() == size {
            true => Ok(encoded.to_vec()),
            false => Err(format!("it has {} of {size} bytes", encoded.len())),
        };
    }
    if layout.nonzeros > count {
        return Err(format!(
            "{} of {count} elements are nonzero",
            layout.nonzeros
        ));
    }
    // Both products are at most `size`.
    let stored = if layout.uniform { 1 } else { layout.nonzeros };
    let Some(split) = encoded.len().checked_sub(stored * width) else {
        return Err(format!(
            "it has too few bytes for {stored} nonzero elements"
        ));
    };
    let (places, values) = encoded.split_at(split);
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
    let mut bytes = vec![0; size];
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
        decode(&layout, bytes, count, 1)
    }

    #[test]
    fn gaps_of_every_length_come_back() {
        for gap in [0, 1, 127, 128, 16_383, 16_384, 300_000] {
            let mut bytes = vec![0u8; gap + 2];
            (bytes[gap], bytes[gap + 1]) = (7, 9);
            let (layout, encoded) = encode(&bytes, 1);
            assert_eq!(decode(&layout, &encoded, bytes.len(), 1), Ok(bytes));
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
            encode(&bytes, 1).0.encoding
        };
        assert_eq!(every(1), Encoding::Dense);
        assert_eq!(every(2), Encoding::Bitmask);
        assert_eq!(every(7), Encoding::Bitmask);
        assert_eq!(every(9), Encoding::Gaps);
    }
}
