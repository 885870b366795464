//! What each thread does of work on rows that do not depend on each other.

use rayon::prelude::*;

/// Numbers below which another thread costs more than it saves.
const LEAST: usize = 1 << 15;

/// How many of so many numbers, in whole rows, a thread takes: all where another one would not pay.
pub(crate) fn share(count: usize, row: usize) -> usize {
    let most = count / LEAST;
    if most < 2 {
        return count;
    }
    let parts = most.min(rayon::current_num_threads());
    let row = row.max(1);
    count.div_ceil(row).div_ceil(parts) * row
}

/// Works on rows of `row` numbers, where there are many on the threads of rayon's current pool: `run` gets the
/// index of the first row of a share, and its numbers. What it returns of each share, in their order.
pub fn in_shares<T: Send, R: Send>(
    values: &mut [T],
    row: usize,
    run: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let share = share(values.len(), row);
    if share >= values.len() {
        return vec![run(0, values)];
    }
    let rows = share / row.max(1);
    let shares = values.par_chunks_mut(share).enumerate();
    shares
        .map(|(index, values)| run(index * rows, values))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes to each number which row it is of, and says in how many shares.
    fn share_out(count: usize, row: usize, threads: usize) -> (Vec<usize>, usize) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let mut values = vec![usize::MAX; count];
        let write = |first: usize, values: &mut [usize]| {
            for (index, values) in (first..).zip(values.chunks_mut(row.max(1))) {
                values.fill(index);
            }
        };
        let shares = pool.unwrap().install(|| in_shares(&mut values, row, write));
        (values, shares.len())
    }

    #[test]
    fn each_row_is_whole_in_one_share() {
        for (count, row, threads, shares) in [
            // No row, rows of no numbers.
            (0, 3, 4, 1),
            (0, 0, 4, 1),
            (2 * LEAST, 0, 2, 2),
            // Few numbers, one thread, more rows than threads and fewer.
            (2 * LEAST - 1, 1, 4, 1),
            (5 * LEAST, 5, 1, 1),
            (5 * LEAST, 5, 4, 4),
            (8 * LEAST, 4 * LEAST, 8, 2),
            // With a row that is cut off.
            (3 * LEAST + 1, LEAST, 8, 2),
        ] {
            let expected: Vec<usize> = (0..count).map(|at| at / row.max(1)).collect();
            let found = share_out(count, row, threads);
            assert!(found == (expected, shares), "{count} {row} {threads}");
        }
    }
}
