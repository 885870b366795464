//! What budget and pattern leave beside a support: room for other weights, and for more of them.

use super::knapsack::{Left, Unit, one_by_one};
use super::{Feasible, Shape, ids};

/// What is left beside a support. Exchanges spend it, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    /// Kept weights in each block of an N:M pattern; empty for other patterns.
    occupancy: Vec<usize>,
    left: Left,
}

impl Feasible {
    /// What is left beside `support`.
    pub(crate) fn room(&self, support: &[usize]) -> Room {
        let mut occupancy = vec![0; self.blocks()];
        if let Shape::Blocks { of, .. } = &self.shape {
            let blocks = support.iter().map(|index| of[*index] as usize);
            blocks.for_each(|block| occupancy[block] += 1);
        }
        let mut counts: Vec<usize> = self.pools.iter().map(|pool| pool.k).collect();
        for index in support {
            let count = &mut counts[self.pool_of(*index)];
            *count = count.saturating_sub(1);
        }
        let used = support.iter().map(|index| self.cost(*index)).sum::<f64>();
        let bound = self.operations.as_ref().map(|operations| operations.bound);
        Room {
            occupancy,
            left: Left::new(counts, bound.map_or(f64::INFINITY, |bound| bound - used)),
        }
    }

    /// Whether the kept weight `leaves` may make room for the pruned weight `enters`.
    pub(crate) fn allows_exchange(&self, leaves: usize, enters: usize, room: &Room) -> bool {
        let has_place = match &self.shape {
            Shape::Blocks { of, .. } if of[leaves] == of[enters] => true,
            _ => self.has_place(enters, room),
        };
        has_place
            && self.pool_of(leaves) == self.pool_of(enters)
            && self.cost(enters) <= self.cost(leaves) + room.left.operations
    }

    /// Spends what an exchange takes of `room`, or gives what it leaves.
    pub(crate) fn record_exchange(&self, leaves: usize, enters: usize, room: &mut Room) {
        if let Shape::Blocks { of, .. } = &self.shape {
            room.occupancy[of[leaves] as usize] -= 1;
            room.occupancy[of[enters] as usize] += 1;
        }
        let left = &mut room.left.operations;
        *left = (*left + self.cost(leaves) - self.cost(enters)).max(0.0);
    }

    /// The pruned weights that there is room for beside `support`, each of them or its group alone;
    /// ascending.
    pub(crate) fn fitting(&self, support: &[usize]) -> Vec<usize> {
        let room = self.room(support);
        let mut is_kept = vec![false; self.parameters];
        support.iter().for_each(|index| is_kept[*index] = true);
        let fits = |unit: Unit| room.left.has_room(&unit);
        if let Shape::Groups { groups, .. } = &self.shape {
            let open = groups.iter().enumerate().filter(|(id, members)| {
                let is_open = members.first().is_some_and(|index| !is_kept[*index]);
                is_open && fits(self.group(*id, members, 0.0))
            });
            let open: Vec<u32> = open.map(|(id, _)| id as u32).collect();
            return self.members(&open);
        }
        let is_open = |index: &usize| {
            !is_kept[*index] && self.has_place(*index, &room) && fits(self.single(*index, 0.0))
        };
        (0..self.parameters).filter(is_open).collect()
    }

    /// Those of the pruned `candidates` (ascending) that there is room for together beside `support`:
    /// what gains most per operation first, and nothing that gains nothing; ascending.
    pub(crate) fn fill(
        &self,
        support: &[usize],
        candidates: &[usize],
        gains: &[f64],
    ) -> Vec<usize> {
        let room = self.room(support);
        let places = |block: usize| match &self.shape {
            Shape::Blocks { n, .. } => n.saturating_sub(room.occupancy[block]),
            _ => 0,
        };
        let mut units = self.units_within(candidates, gains, places);
        units.retain(|unit| unit.score > 0.0);
        self.members(&ids(&one_by_one(units, room.left)))
    }

    /// Whether the block of a pruned weight has room for it.
    fn has_place(&self, index: usize, room: &Room) -> bool {
        match &self.shape {
            Shape::Blocks { of, n, .. } => room.occupancy[of[index] as usize] < *n,
            _ => true,
        }
    }
}
