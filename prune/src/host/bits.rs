//! Flags packed eight to a byte, the first in the lowest bit.

/// Bytes that `flags` flags take.
pub(crate) fn packed_len(flags: usize) -> usize {
    flags.div_ceil(8)
}

/// Packs flags; what is left of the last byte is zero.
pub(crate) fn pack(flags: impl IntoIterator<Item = bool>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, flag) in flags.into_iter().enumerate() {
        if at % 8 == 0 {
            bytes.push(0);
        }
        if flag && let Some(last) = bytes.last_mut() {
            *last |= 1 << (at % 8);
        }
    }
    bytes
}

/// The first `count` flags, or `None` if the bytes are not what [`pack`] makes of that many.
pub(crate) fn unpack(bytes: &[u8], count: usize) -> Option<Vec<bool>> {
    if bytes.len() != packed_len(count) {
        return None;
    }
    let flag = |at: usize| bytes[at / 8] >> (at % 8) & 1 == 1;
    let rest_is_zero = (count..bytes.len() * 8).all(|at| !flag(at));
    rest_is_zero.then(|| (0..count).map(flag).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_of_up_to_nine_flags_comes_back() {
        for count in 0..=9 {
            for pattern in 0..1u32 << count {
                let flags: Vec<bool> = (0..count).map(|at| pattern >> at & 1 == 1).collect();
                let bytes = pack(flags.iter().copied());
                assert_eq!(bytes.len(), packed_len(count));
                assert_eq!(unpack(&bytes, count), Some(flags));
            }
        }
    }

    #[test]
    fn a_wrong_number_of_bytes_and_a_flag_behind_the_last_are_refused() {
        assert_eq!(unpack(&[0, 0], 8), None);
        assert_eq!(unpack(&[], 1), None);
        assert_eq!(unpack(&[0b1000], 3), None);
    }
}
