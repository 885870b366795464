//! Single weights by what they cost, so that the best at a price are found without looking at all.
//!
//! Of weights with the same cost the order of their scores is that of their worth at every price.
//! Sorted once, they are taken from the front.

use rayon::slice::ParallelSliceMut;

use super::knapsack::{Unit, better};

/// Units of one weight each, of one cost in each class.
pub(super) struct CostClasses {
    /// Ascending in the cost; the best unit first in each.
    classes: Vec<Vec<Unit>>,
}

impl CostClasses {
    pub(super) fn new(units: &[Unit]) -> Self {
        let mut sorted = units.to_vec();
        sorted.par_sort_unstable_by(|a, b| a.cost.total_cmp(&b.cost).then(better(a, b, 0.0)));
        let classes = sorted.chunk_by(|a, b| a.cost == b.cost);
        Self {
            classes: classes.map(<[Unit]>::to_vec).collect(),
        }
    }

    /// How many of each class are among the `cap` units that are worth most at a price, of those that
    /// are worth anything; of equals the cheaper ones.
    pub(super) fn best(&self, cap: usize, price: f64) -> Vec<usize> {
        let worthwhile = self.above(0.0, price);
        if worthwhile.iter().sum::<usize>() <= cap {
            return worthwhile;
        }
        // Positive floating-point numbers are ordered as their bits are. The least limit above which
        // no more than `cap` are worth something:
        let (mut low, mut high) = (0, f64::MAX.to_bits());
        while low < high {
            let middle = low + (high - low) / 2;
            let above = self.above(f64::from_bits(middle), price);
            match above.iter().sum::<usize>() <= cap {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        let mut counts = self.above(f64::from_bits(high), price);
        let mut left = cap - counts.iter().sum::<usize>();
        // Those that are worth exactly the limit.
        let from = self.above(f64::from_bits(high.saturating_sub(1)), price);
        for (count, from) in counts.iter_mut().zip(from) {
            let more = (from - *count).min(left);
            *count += more;
            left -= more;
        }
        counts
    }

    /// How many of each class are worth more than a limit.
    fn above(&self, limit: f64, price: f64) -> Vec<usize> {
        let classes = self.classes.iter();
        let worth = |unit: &Unit| unit.score - price * unit.cost;
        classes
            .map(|class| class.partition_point(|unit| worth(unit) > limit))
            .collect()
    }

    /// What so many of each class cost.
    pub(super) fn operations(&self, counts: &[usize]) -> f64 {
        let pairs = self.classes.iter().zip(counts);
        pairs
            .map(|(class, count)| class[0].cost * *count as f64)
            .sum()
    }

    /// So many of each class.
    pub(super) fn take(&self, counts: &[usize]) -> Vec<Unit> {
        let pairs = self.classes.iter().zip(counts);
        pairs
            .flat_map(|(class, count)| class[..*count].iter().copied())
            .collect()
    }
}
