//! The best of what competes for counts and for operations.
//!
//! A bound on operations is met by a price per operation (a Lagrange multiplier); groups of
//! different sizes are taken by score per weight.

use super::cost_classes::CostClasses;

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

/// Whether what is left of the counts has room for the unit, which takes it then.
fn admit(left: &mut [usize], unit: &Unit) -> bool {
    let rest = left[unit.pool as usize].checked_sub(unit.weights as usize);
    if let Some(rest) = rest {
        left[unit.pool as usize] = rest;
    }
    rest.is_some()
}

/// The best units within the counts of their pools, at a price per operation.
pub(super) fn take(units: &[Unit], caps: &[usize], price: f64) -> Vec<Unit> {
    let worthwhile = |unit: &&Unit| price == 0.0 || worth(unit, price) > 0.0;
    if units.iter().any(|unit| unit.weights > 1) {
        let mut order: Vec<Unit> = units.iter().filter(worthwhile).copied().collect();
        order.sort_unstable_by(|a, b| better(a, b, price));
        let mut left = caps.to_vec();
        order.retain(|unit| admit(&mut left, unit));
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
/// At a price per operation the best are those with the largest score − price · cost. Where only the
/// operations bind, these are the units with the largest score per operation; where the counts do as
/// well, the lowest price that fits is found by halving; where none fits, one unit after the other is
/// taken.
pub(super) fn within_operations(units: &[Unit], caps: &[usize], bound: f64) -> Vec<Unit> {
    let cost = |chosen: &[Unit]| chosen.iter().map(|unit| unit.cost).sum::<f64>();
    let free = take(units, caps, 0.0);
    if cost(&free) <= bound {
        return free;
    }
    let highest = units.iter().map(per_operation).fold(0.0, f64::max);
    let best = match caps {
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
            lowest_price(highest, |price| cost(&at(price)) <= bound).map_or(Vec::new(), at)
        }
    };
    match best.is_empty() {
        true => one_by_one(units, caps, bound),
        false => best,
    }
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

/// Units in the order of their score per operation, those without one after them in the order of
/// their score, as long as they fit.
fn one_by_one(units: &[Unit], caps: &[usize], bound: f64) -> Vec<Unit> {
    let per_operation = |unit: &Unit| match unit.score > 0.0 {
        true => unit.score / unit.cost,
        false => 0.0,
    };
    let mut order = units.to_vec();
    order.sort_unstable_by(|a, b| {
        per_operation(b)
            .total_cmp(&per_operation(a))
            .then(better(a, b, 0.0))
    });
    let (mut left, mut operations) = (caps.to_vec(), bound);
    order.retain(|unit| {
        let fits = unit.cost <= operations && admit(&mut left, unit);
        if fits {
            operations -= unit.cost;
        }
        fits
    });
    order
}
