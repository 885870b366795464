//! Float matrices of 2:4: the kept values, and a bit for each element.

/// The matrix of `kept`, the values of each row one after the other, and `bitmask`, which elements they are:
/// eight to a byte, the first in the lowest bit, each row in bytes of its own; or what is wrong.
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
    fn two_of_four_come_back_and_bitmasks_of_other_values_are_refused() {
        let kept = [1.0, 2.0, 0.0, -0.0, 3.0, 4.0];
        let bitmask = [0b0101_1010, 0b0011];
        let values = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, -0.0, 0.0, 3.0, 4.0, 0.0, 0.0];
        let found = decompress(&kept, &bitmask, 1, 12).unwrap();
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&found), bits(&values));
        assert!(decompress(&kept[1..], &bitmask, 1, 12).is_err());
        assert!(decompress(&kept, &[0xff, 0], 1, 12).is_err());
        assert!(decompress(&kept, &bitmask[1..], 1, 12).is_err());
    }
}
