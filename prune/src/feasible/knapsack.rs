//! The best of what competes for counts and for operations.
//!
//! A bound on operations is met by a price per operation (a Lagrange multiplier); groups of
//! different sizes are taken by score per weight.

use std::collections::HashMap;

/// Something that is kept or pruned as one: a weight or a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub(super) id: u32,
    /// The pool of its first weight.
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

/// Units with weights in several pools, by their id: the pools, and how many weights in each.
pub(super) type Across = HashMap<u32, Vec<(u32, u32)>>;

/// What is left of the counts of the pools.
struct Room<'a> {
    left: Vec<usize>,
    across: &'a Across,
}

impl<'a> Room<'a> {
    fn new(caps: &[usize], across: &'a Across) -> Self {
        let left = caps.to_vec();
        Self { left, across }
    }

    /// Whether there was room for the unit, in all of its pools; it is taken.
    fn admit(&mut self, unit: &Unit) -> bool {
        let one = [(unit.pool, unit.weights)];
        let parts = self.across.get(&unit.id).map_or(&one[..], Vec::as_slice);
        let fits = |(pool, weights): &(u32, u32)| *weights as usize <= self.left[*pool as usize];
        let admitted = parts.iter().all(fits);
        if admitted {
            for (pool, weights) in parts {
                self.left[*pool as usize] -= *weights as usize;
            }
        }
        admitted
    }
}

/// The best units within the counts of their pools, at a price per operation.
pub(super) fn take(units: &[Unit], caps: &[usize], across: &Across, price: f64) -> Vec<u32> {
    let worthwhile = |unit: &&Unit| price == 0.0 || worth(unit, price) > 0.0;
    if units.iter().any(|unit| unit.weights > 1) {
        let mut order: Vec<&Unit> = units.iter().filter(worthwhile).collect();
        order.sort_unstable_by(|a, b| better(a, b, price));
        let mut room = Room::new(caps, across);
        order.retain(|unit| room.admit(unit));
        return order.into_iter().map(|unit| unit.id).collect();
    }
    let mut chosen = Vec::new();
    for (pool, cap) in caps.iter().enumerate() {
        let of_pool = units.iter().filter(|unit| unit.pool as usize == pool);
        let mut members: Vec<&Unit> = of_pool.filter(worthwhile).collect();
        if *cap < members.len() {
            members.select_nth_unstable_by(*cap, |a, b| better(a, b, price));
            members.truncate(*cap);
        }
        chosen.extend(members.iter().map(|unit| unit.id));
    }
    chosen
}

/// [`take`] at the lowest price that keeps the operations within `bound`; where no price does, one
/// unit after the other as they fit.
pub(super) fn within_operations(
    units: &[Unit],
    caps: &[usize],
    across: &Across,
    bound: f64,
) -> Vec<u32> {
    let cost: HashMap<u32, f64> = units.iter().map(|unit| (unit.id, unit.cost)).collect();
    let fits = |chosen: &[u32]| chosen.iter().map(|id| cost[id]).sum::<f64>() <= bound;
    let free = take(units, caps, across, 0.0);
    if fits(&free) {
        return free;
    }
    let rate = |unit: &Unit| {
        if unit.cost > 0.0 {
            unit.score / unit.cost
        } else {
            0.0
        }
    };
    let (mut low, mut high) = (0.0, units.iter().map(rate).fold(0.0, f64::max));
    let mut best = Vec::new();
    // Each halving decides one bit of the price; after 60 it is as exact as an F64 can be.
    for _ in 0..60 {
        let price = 0.5 * (low + high);
        let chosen = take(units, caps, across, price);
        match fits(&chosen) {
            true => (high, best) = (price, chosen),
            false => low = price,
        }
    }
    match best.is_empty() {
        true => one_by_one(units, Room::new(caps, across), bound),
        false => best,
    }
}

/// Units in the order of their score per operation, those without one after them in the order of
/// their score, as long as they fit.
fn one_by_one(units: &[Unit], mut room: Room<'_>, bound: f64) -> Vec<u32> {
    let per_operation = |unit: &Unit| match unit.score > 0.0 {
        true => unit.score / unit.cost,
        false => 0.0,
    };
    let mut order: Vec<&Unit> = units.iter().collect();
    order.sort_unstable_by(|a, b| {
        per_operation(b)
            .total_cmp(&per_operation(a))
            .then(better(a, b, 0.0))
    });
    let mut operations = bound;
    let mut chosen = Vec::new();
    for unit in order {
        if unit.cost <= operations && room.admit(unit) {
            operations -= unit.cost;
            chosen.push(unit.id);
        }
    }
    chosen
}
