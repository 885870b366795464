//! Float matrices of 2:4: the kept values, and a bit for each element.

/// `compressed`, two values of each four of a row, and `bitmask`, which they are: eight to a byte, the
/// first in the lowest bit, each row in bytes of its own. `None` where a group has more than two.
pub(super) fn compress(values: &[f32], columns: usize) -> Option<(Vec<f32>, Vec<u8>)> {
    if columns == 0 || !columns.is_multiple_of(4) {
        return None;
    }
    let (mut kept, mut bitmask) = (Vec::with_capacity(values.len() / 2), Vec::new());
    for row in values.chunks(columns) {
        let mut flags = vec![0_u8; columns.div_ceil(8)];
        for (group, four) in row.chunks(4).enumerate() {
            let mut places: Vec<usize> = (0..4).filter(|at| four[*at].to_bits() != 0).collect();
            if places.len() > 2 {
                return None;
            }
            // Filled up with zeros.
            let zeros: Vec<usize> = (0..4).filter(|at| !places.contains(at)).collect();
            places.extend(&zeros[..2 - places.len()]);
            places.sort_unstable();
            for at in places {
                let column = group * 4 + at;
                flags[column / 8] |= 1 << (column % 8);
                kept.push(four[at]);
            }
        }
        bitmask.extend(flags);
    }
    Some((kept, bitmask))
}

/// The matrix, or what is wrong.
pub(super) fn decompress(
    kept: &[f32],
    bitmask: &[u8],
    rows: usize,
    columns: usize,
) -> Result<Vec<f32>, String> {
    let bytes = columns.div_ceil(8);
    if bitmask.len() != rows * bytes {
        return Err(format!(
            "its bitmask has {} of {} bytes",
            bitmask.len(),
            rows * bytes
        ));
    }
    let mut values = vec![0.0; rows * columns];
    let mut left = kept.iter();
    for row in 0..rows {
        for column in 0..bytes * 8 {
            if bitmask[row * bytes + column / 8] >> (column % 8) & 1 == 0 {
                continue;
            }
            let value = left.next().filter(|_| column < columns);
            values[row * columns + column.min(columns - 1)] =
                *value.ok_or("its bitmask marks more elements than there are values")?;
        }
    }
    match left.next() {
        None => Ok(values),
        Some(_) => Err("its bitmask marks fewer elements than there are values".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_of_four_come_back_and_more_are_refused() {
        let values = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, -0.0, 0.0, 3.0, 4.0, 0.0, 0.0];
        let (kept, bitmask) = compress(&values, 12).unwrap();
        assert_eq!(kept, [1.0, 2.0, 0.0, -0.0, 3.0, 4.0]);
        assert_eq!(bitmask, [0b0101_1010, 0b0011]);
        let found = decompress(&kept, &bitmask, 1, 12).unwrap();
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&found), bits(&values));
        assert!(compress(&[1.0, 1.0, 1.0, 0.0], 4).is_none());
        assert!(compress(&[1.0, 0.0], 2).is_none());
        assert!(decompress(&kept[1..], &bitmask, 1, 12).is_err());
        assert!(decompress(&kept, &[0xff, 0], 1, 12).is_err());
        assert!(decompress(&kept, &bitmask[1..], 1, 12).is_err());
    }
}
