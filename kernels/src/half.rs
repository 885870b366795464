//! Numbers of half precision as bits.

/// The nearest BF16, ties to even.
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let round = 0x7fff + ((bits >> 16) & 1);
    (bits.wrapping_add(round) >> 16) as u16
}

/// The nearest F16, ties to even; infinite beyond 65,504.
pub(crate) fn to_f16(x: f32) -> u16 {
    let sign = ((x.to_bits() >> 16) & 0x8000) as u16;
    let x = x.abs();
    if x.is_nan() {
        return sign | 0x7e00;
    }
    if x >= 65520.0 {
        return sign | 0x7c00;
    }
    if x < f32::from_bits(0x3880_0000) {
        // Below 2⁻¹⁴ all steps are 2⁻²⁴.
        return sign | (x * 16_777_216.0).round_ties_even() as u16;
    }
    let bits = x.to_bits();
    let rounded = bits + 0xfff + ((bits >> 13) & 1);
    sign | ((rounded - (112 << 23)) >> 13) as u16
}

/// What F16 bits stand for.
#[inline(always)]
pub(crate) fn from_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    // The exponent is biased by 15, not by 127: 2¹¹² apart, which also makes subnormals normal.
    let value = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let value = if magnitude >= 0x7c00 << 13 {
        f32::from_bits(magnitude | 0x7f80_0000)
    } else {
        value
    };
    f32::from_bits(value.to_bits() | sign)
}

#[inline(always)]
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_come_back_as_they_were() {
        for bits in 0..=u16::MAX {
            let (a, b) = (from_f16(bits), from_bf16(bits));
            if !a.is_nan() {
                assert_eq!(to_f16(a), bits, "{a}");
            }
            if !b.is_nan() {
                assert_eq!(to_bf16(b), bits, "{b}");
            }
        }
        assert!(from_f16(0x7e00).is_nan() && from_bf16(to_bf16(f32::NAN)).is_nan());
    }

    #[test]
    fn numbers_between_two_halves_go_to_the_nearer_or_the_even_one() {
        assert_eq!(from_f16(to_f16(1.0 + 1.0 / 2048.0)), 1.0);
        assert_eq!(from_f16(to_f16(1.0 + 3.0 / 2048.0)), 1.0 + 2.0 / 1024.0);
        assert_eq!(from_f16(to_f16(65519.0)), 65504.0);
        assert_eq!(from_f16(to_f16(-65520.0)), f32::NEG_INFINITY);
        assert_eq!(from_f16(to_f16(6.2e-8)), f32::powi(2.0, -24));
        assert_eq!(from_bf16(to_bf16(1.0 + 1.0 / 256.0)), 1.0);
        assert_eq!(from_bf16(to_bf16(1.0 + 3.0 / 256.0)), 1.0 + 2.0 / 128.0);
    }
}
