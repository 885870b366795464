//! Numbers of a few bits, packed side by side, the first in the lowest bits of a byte.

/// Bytes that so many numbers take.
pub fn packed_len(count: usize, bits: u8) -> usize {
    (count * usize::from(bits)).div_ceil(8)
}

/// Numbers of 1 to 8 bits, of which higher ones are cut off; what is left of the last byte is zero.
pub fn pack(numbers: impl IntoIterator<Item = u8>, bits: u8) -> Vec<u8> {
    let mask = u8::MAX >> (8 - bits);
    let mut bytes = Vec::new();
    let (mut open, mut filled) = (0u16, 0);
    for number in numbers {
        open |= u16::from(number & mask) << filled;
        filled += bits;
        if filled >= 8 {
            bytes.push(open as u8);
            open >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        bytes.push(open as u8);
    }
    bytes
}

/// The inverse of [`pack`]; `None` for another number of bytes than so many numbers take.
pub fn unpack(bytes: &[u8], bits: u8, count: usize) -> Option<Vec<u8>> {
    // Before the number of bits is one that cannot be counted.
    if count / 8 > bytes.len() || bytes.len() != packed_len(count, bits) {
        return None;
    }
    let mask = u8::MAX >> (8 - bits);
    let number = |at: usize| {
        let first = at * usize::from(bits);
        let low = u16::from(bytes[first / 8]);
        let high = bytes.get(first / 8 + 1).map_or(0, |byte| u16::from(*byte));
        ((low | high << 8) >> (first % 8)) as u8 & mask
    };
    Some((0..count).map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_numbers_come_back_at_every_width() {
        for bits in 1..=8u8 {
            let values: Vec<u8> = (0..37u32).map(|at| (at * 29 % (1 << bits)) as u8).collect();
            let bytes = pack(values.iter().copied(), bits);
            assert_eq!(bytes.len(), (37 * usize::from(bits)).div_ceil(8));
            assert_eq!(unpack(&bytes, bits, 37), Some(values));
            assert_eq!(unpack(&bytes, bits, 70), None);
        }
    }
}
