//! The best of what competes for counts and for operations.
//!
//! A bound on operations is met by a price per operation (a Lagrange multiplier), and what that leaves
//! of it by one unit after the other; groups of different sizes are taken by score per weight.

use super::cost_classes::CostClasses;

/// Units that are sorted first where one after the other is taken; twice as many next.
const FIRST: usize = 1024;

/// Something that is kept or pruned as one: a weight or a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub(super) id: u32,
    /// The pool of its weights.
    pub(super) pool: u32,
    pub(super) weights: u32,
    pub(super) score: f64,
    pub(super) cost: f64,
}

/// Whether `a` comes before `b`: a larger score per weight, after the price of its operations.
pub(super) fn better(a: &Unit, b: &Unit, price: f64) -> std::cmp::Ordering {
    worth(b, price)
        .total_cmp(&worth(a, price))
        .then(a.id.cmp(&b.id))
}

fn worth(unit: &Unit, price: f64) -> f64 {
    (unit.score - price * unit.cost) / f64::from(unit.weights)
}

/// What is left of the counts of pools, and of operations.
#[derive(Debug, Clone)]
pub(super) struct Left {
    counts: Vec<usize>,
    /// Not negative; infinite where nothing bounds them.
    pub(super) operations: f64,
}

impl Left {
    pub(super) fn new(counts: Vec<usize>, operations: f64) -> Self {
        Self {
            counts,
            operations: operations.max(0.0),
        }
    }

    pub(super) fn has_room(&self, unit: &Unit) -> bool {
        self.counts[unit.pool as usize] >= unit.weights as usize && unit.cost <= self.operations
    }

    fn spend(&mut self, unit: &Unit) {
        self.counts[unit.pool as usize] -= unit.weights as usize;
        self.operations = (self.operations - unit.cost).max(0.0);
    }

    /// Whether there is room for the unit, which takes it then.
    fn admit(&mut self, unit: &Unit) -> bool {
        let fits = self.has_room(unit);
        if fits {
            self.spend(unit);
        }
        fits
    }
}

/// The best units within the counts of their pools, at a price per operation.
pub(super) fn take(units: &[Unit], caps: &[usize], price: f64) -> Vec<Unit> {
    let worthwhile = |unit: &&Unit| price == 0.0 || worth(unit, price) > 0.0;
    if units.iter().any(|unit| unit.weights > 1) {
        let mut order: Vec<Unit> = units.iter().filter(worthwhile).copied().collect();
        order.sort_unstable_by(|a, b| better(a, b, price));
        let mut left = Left::new(caps.to_vec(), f64::INFINITY);
        order.retain(|unit| left.admit(unit));
        return order;
    }
    let mut pools: Vec<Vec<Unit>> = vec![Vec::new(); caps.len()];
    for unit in units.iter().filter(worthwhile) {
        if let Some(pool) = pools.get_mut(unit.pool as usize) {
            pool.push(*unit);
        }
    }
    let mut chosen = Vec::new();
    for (mut members, cap) in pools.into_iter().zip(caps) {
        if *cap < members.len() {
            members.select_nth_unstable_by(*cap, |a, b| better(a, b, price));
            members.truncate(*cap);
        }
        chosen.extend(members);
    }
    chosen
}

/// What is taken of all units where the operations are bounded, too.
///
/// Those that are [`worth a price`](at_a_price), and of the others that are worth anything one after
/// the other as long as they fit: a price decides about all units of one worth per operation, and the
/// first of them that does not fit would keep cheaper ones out. Where none of those fits, one after the
/// other of all.
pub(super) fn within_operations(units: &[Unit], caps: &[usize], bound: f64) -> Vec<Unit> {
    let free = take(units, caps, 0.0);
    if operations(&free) <= bound {
        return free;
    }
    let mut chosen = at_a_price(units, caps, bound);
    let mut left = Left::new(caps.to_vec(), bound);
    chosen.iter().for_each(|unit| left.spend(unit));
    let ids = units.iter().map(|unit| unit.id as usize + 1).max();
    let mut is_chosen = vec![false; ids.unwrap_or(0)];
    for unit in &chosen {
        is_chosen[unit.id as usize] = true;
    }
    let is_open = |unit: &&Unit| unit.score > 0.0 && !is_chosen[unit.id as usize];
    let open = units.iter().filter(is_open).copied().collect();
    chosen.extend(one_by_one(open, left.clone()));
    match chosen.is_empty() {
        true => one_by_one(units.to_vec(), left),
        false => chosen,
    }
}

/// The best at a price per operation: those with the largest score − price · cost.
///
/// Where only the operations bind, these are the units with the largest score per operation; where the
/// counts do as well, the lowest price that fits is found by halving. Nothing where none does.
fn at_a_price(units: &[Unit], caps: &[usize], bound: f64) -> Vec<Unit> {
    let highest = units.iter().map(per_operation).fold(0.0, f64::max);
    match caps {
        [cap] if units.iter().all(|unit| unit.weights == 1) => {
            let best = best_per_operation(units, bound);
            match best.len() <= *cap {
                true => best,
                false => {
                    let classes = CostClasses::new(units);
                    let fits = |price| classes.operations(&classes.best(*cap, price)) <= bound;
                    let price = lowest_price(highest, fits);
                    price.map_or(Vec::new(), |price| classes.take(&classes.best(*cap, price)))
                }
            }
        }
        _ => {
            let at = |price| take(units, caps, price);
            let price = lowest_price(highest, |price| operations(&at(price)) <= bound);
            price.map_or(Vec::new(), at)
        }
    }
}

/// What units cost together.
fn operations(units: &[Unit]) -> f64 {
    units.iter().map(|unit| unit.cost).sum()
}

/// The lowest price up to `highest` that `fits`, if one does.
fn lowest_price(highest: f64, fits: impl Fn(f64) -> bool) -> Option<f64> {
    let (mut low, mut high, mut found) = (0.0, highest, None);
    // Each halving decides one bit of the price; after 60 it is as exact as an F64 can be.
    for _ in 0..60 {
        let price = 0.5 * (low + high);
        match fits(price) {
            true => (high, found) = (price, Some(price)),
            false => low = price,
        }
    }
    found
}

/// A price at which the unit is no longer worth its operations.
fn per_operation(unit: &Unit) -> f64 {
    match unit.cost > 0.0 {
        true => unit.score / unit.cost,
        false => 0.0,
    }
}

/// The single weights with the largest score per operation, as many as fit; of those that cost
/// nothing all that are worth anything.
fn best_per_operation(units: &[Unit], bound: f64) -> Vec<Unit> {
    let worth_something = |unit: &&Unit| unit.score > 0.0;
    let (mut chosen, mut open): (Vec<Unit>, Vec<Unit>) = units
        .iter()
        .filter(worth_something)
        .partition(|unit| unit.cost <= 0.0);
    let mut left = bound;
    // The better half fits, or the line is inside of it.
    let mut open = open.as_mut_slice();
    while let Some(last) = open.len().checked_sub(1) {
        let half = last / 2;
        open.select_nth_unstable_by(half, |a, b| {
            per_operation(b)
                .total_cmp(&per_operation(a))
                .then(a.id.cmp(&b.id))
        });
        let cost: f64 = open[..=half].iter().map(|unit| unit.cost).sum();
        match cost <= left {
            true => {
                left -= cost;
                chosen.extend_from_slice(&open[..=half]);
                open = &mut open[half + 1..];
            }
            false if half == 0 => break,
            false => open = &mut open[..half],
        }
    }
    chosen
}

/// One unit after the other, each if there is room for it: in the order of their score per operation,
/// those without one after them in the order of their score.
pub(super) fn one_by_one(mut open: Vec<Unit>, mut left: Left) -> Vec<Unit> {
    let mut chosen = Vec::new();
    let mut count = FIRST;
    loop {
        // Of a million units most fit no more once some are taken: those need no order.
        open.retain(|unit| left.has_room(unit));
        if open.is_empty() {
            return chosen;
        }
        let mut later = Vec::new();
        if count < open.len() {
            open.select_nth_unstable_by(count, in_turn);
            later = open.split_off(count);
        }
        open.sort_unstable_by(in_turn);
        open.retain(|unit| left.admit(unit));
        chosen.append(&mut open);
        open = later;
        count *= 2;
    }
}

/// Whether `a` comes before `b` where one unit after the other is taken.
fn in_turn(a: &Unit, b: &Unit) -> std::cmp::Ordering {
    let rate = |unit: &Unit| match unit.score > 0.0 {
        true => unit.score / unit.cost,
        false => 0.0,
    };
    rate(b).total_cmp(&rate(a)).then_with(|| better(a, b, 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers below a limit, from a seed.
    fn below(state: &mut u64, limit: u64) -> u64 {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % limit
    }

    /// Units of few costs, two pools, and `most` weights at most; some are worth nothing, or less.
    fn units(state: &mut u64, count: u32, most: u64) -> Vec<Unit> {
        let unit = |id: u32| Unit {
            id,
            pool: u32::from(most > 1 && id.is_multiple_of(3)),
            weights: 1 + below(state, most) as u32,
            score: below(state, 60) as f64 - 5.0,
            cost: [0.0, 2.0, 3.0, 18.0, 50.0][below(state, 5) as usize],
        };
        (0..count).map(unit).collect()
    }

    #[test]
    fn what_is_worth_anything_and_left_out_does_not_fit() {
        let mut filled = 0;
        for seed in 0..600 {
            let state = &mut (seed * 77 + 5);
            let most = [1, 4][seed as usize % 2];
            let count = 4 + below(state, 30) as u32;
            let units = units(state, count, most);
            let caps = match most {
                1 => vec![[usize::MAX, 5][seed as usize / 2 % 2]],
                _ => vec![20, 10],
            };
            let bound = below(state, 300) as f64;
            let chosen = within_operations(&units, &caps, bound);
            assert!(operations(&chosen) <= bound, "seed {seed}");
            let mut left = Left::new(caps.clone(), bound);
            assert!(chosen.iter().all(|unit| left.admit(unit)), "seed {seed}");
            let is_chosen = |id| chosen.iter().any(|unit| unit.id == id);
            for unit in units.iter().filter(|unit| !is_chosen(unit.id)) {
                let fits = unit.score > 0.0 && left.has_room(unit);
                assert!(!fits, "seed {seed}: {unit:?} beside {chosen:?}");
            }
            if operations(&take(&units, &caps, 0.0)) > bound {
                let priced = at_a_price(&units, &caps, bound);
                assert!(priced.iter().all(|unit| is_chosen(unit.id)), "seed {seed}");
                filled += usize::from(!priced.is_empty() && priced.len() < chosen.len());
            }
        }
        assert!(filled > 50, "{filled}");
    }

    /// More units than are sorted at once, against all of them in order.
    #[test]
    fn one_after_the_other_is_taken_as_if_all_were_sorted() {
        let state = &mut 3;
        let units = units(state, 5 * FIRST as u32, 1);
        for bound in [0.0, 17.0, 1000.0, 20_000.0, 1e9] {
            for cap in [10, 2500, usize::MAX] {
                let left = Left::new(vec![cap], bound);
                let found = one_by_one(units.clone(), left.clone());
                let mut expected = units.clone();
                expected.sort_unstable_by(in_turn);
                let mut rest = left;
                expected.retain(|unit| rest.admit(unit));
                let ids = |units: &[Unit]| units.iter().map(|unit| unit.id).collect::<Vec<_>>();
                assert_eq!(ids(&found), ids(&expected), "{bound}, {cap}");
            }
        }
    }

    /// The dear unit is worth more per operation, and does not fit any more.
    #[test]
    fn cheaper_units_are_taken_where_the_next_one_does_not_fit() {
        let unit = |id, score, cost| Unit {
            id,
            pool: 0,
            weights: 1,
            score,
            cost,
        };
        let units = [
            unit(0, 40.0, 18.0),
            unit(1, 36.0, 18.0),
            unit(2, 1.0, 2.0),
            unit(3, 2.0, 2.0),
            unit(4, -1.0, 2.0),
        ];
        for (bound, expected) in [(35.0, vec![0, 3, 2]), (20.0, vec![0, 3]), (3.0, vec![3])] {
            for caps in [[5], [3]] {
                let chosen = within_operations(&units, &caps, bound);
                let mut ids: Vec<u32> = chosen.iter().map(|unit| unit.id).collect();
                ids.sort_by_key(|id| expected.iter().position(|other| other == id));
                assert_eq!(ids, expected, "{bound}");
            }
        }
    }
}
