//! Flags packed eight to a byte, the first in the lowest bit.

use burn_lean_reparam::bits;

/// Packs flags; what is left of the last byte is zero.
pub(crate) fn pack(flags: impl IntoIterator<Item = bool>) -> Vec<u8> {
    bits::pack(flags.into_iter().map(u8::from), 1)
}

/// The first `count` flags, or `None` if the bytes are not what [`pack`] makes of that many.
pub(crate) fn unpack(bytes: &[u8], count: usize) -> Option<Vec<bool>> {
    let flags = bits::unpack(bytes, 1, count)?;
    let rest_is_zero = count.is_multiple_of(8) || bytes[count / 8] >> (count % 8) == 0;
    rest_is_zero.then(|| flags.into_iter().map(|flag| flag == 1).collect())
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
                assert_eq!(bytes.len(), bits::packed_len(count, 1));
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
