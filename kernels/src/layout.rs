//! How weights lie in memory: panels of [`WIDTH`] columns, rows of a panel one after the other.

/// Columns of a panel.
pub(crate) const WIDTH: usize = 16;

pub(crate) fn panels(columns: usize) -> usize {
    columns.div_ceil(WIDTH)
}

/// Numbers from a row to the next: lines of the cache apart, so that the rows of a tile do not take
/// each other's place in it.
pub(crate) fn apart(terms: usize, bytes: usize) -> usize {
    match (terms * bytes).is_multiple_of(1024) {
        true => terms + 64 / bytes,
        false => terms,
    }
}

/// The panels of a row-major matrix; columns that fill up the last one are zero.
pub(crate) fn in_panels<T: Copy + Default, U: Copy + Default>(
    values: &[T],
    rows: usize,
    columns: usize,
    convert: impl Fn(T) -> U,
) -> Vec<[U; WIDTH]> {
    let mut packed = Vec::with_capacity(panels(columns) * rows);
    for start in (0..columns).step_by(WIDTH) {
        let width = WIDTH.min(columns - start);
        for row in 0..rows {
            let at = row * columns + start;
            let mut line = [U::default(); WIDTH];
            for (to, from) in line.iter_mut().zip(&values[at..at + width]) {
                *to = convert(*from);
            }
            packed.push(line);
        }
    }
    packed
}

/// Two rows of a panel beside each other: the pairs that one instruction multiplies and adds.
pub(crate) fn in_pairs(codes: &[i8], rows: usize, columns: usize) -> Vec<[i8; 2 * WIDTH]> {
    let lines = in_panels(codes, rows, columns, |code| code);
    let pair = |pair: &[[i8; WIDTH]]| {
        let mut both = [0; 2 * WIDTH];
        for column in 0..WIDTH {
            both[2 * column] = pair[0][column];
            // A row that fills up a pair is zero.
            both[2 * column + 1] = pair.get(1).map_or(0, |second| second[column]);
        }
        both
    };
    if rows == 0 {
        return Vec::new();
    }
    let panels = lines.chunks_exact(rows);
    panels.flat_map(|panel| panel.chunks(2).map(pair)).collect()
}

/// Two rows of 4-bit codes, each with 8 added to it, in the halves of a byte: low half first.
pub(crate) fn in_nibbles(codes: &[i8], rows: usize, columns: usize) -> Vec<[u8; WIDTH]> {
    let nibble = |code: i8| (code + 8) as u8;
    let pairs = in_pairs(codes, rows, columns);
    let packed = pairs.into_iter().map(|pair| {
        let mut bytes = [0; WIDTH];
        for (byte, pair) in bytes.iter_mut().zip(pair.chunks_exact(2)) {
            *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
        }
        bytes
    });
    packed.collect()
}
