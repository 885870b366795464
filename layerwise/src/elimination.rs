//! Optimal brain surgeon: weights leave one at a time, the cheapest first, and the others make it good.
//!
//! With P = [H_S]⁻¹ of a row, removing w_k and solving again costs ½ w_k²/P_kk; after that
//! w ← w − P_·k w_k/P_kk and P ← P − P_·k P_k·/P_kk
//! ([Hassibi & Stork, 1993](https://papers.nips.cc/paper/1992/hash/303ed4c69846ab36c2904d3ba8573050-Abstract.html);
//! [Frantar et al., 2022](https://arxiv.org/abs/2208.11580) for layers). Rows do not depend on each
//! other, so that the cheapest weight of a layer is always the next one of some row: d³/3 operations
//! a row give the order for every number of weights to keep.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use faer::Mat;
use rayon::prelude::*;

use crate::{Keep, LayerProblem, Support};

/// A share of removed weights at which a row's system is made smaller.
const COMPACT_AT: usize = 4;

/// The support that optimal brain surgeon leaves from all weights.
pub(crate) fn obs(problem: &LayerProblem, keep: &Keep) -> Support {
    let (o, d) = (problem.outputs(), problem.features());
    let removed: Vec<(usize, usize)> = match *keep {
        Keep::Weights(count) => {
            let mut order = merge(problem, each_row(problem, |row| row.eliminate(0, |_| true)));
            order.truncate(o * d - count);
            order
        }
        Keep::PerRow(count) => in_rows(each_row(problem, |row| row.eliminate(count, |_| true))),
        Keep::NOfM { n, m } => in_rows(each_row(problem, |row| {
            let mut left = vec![m; d / m];
            row.eliminate(d / m * n, |place: usize| {
                let may_leave = left[place / m] > n;
                left[place / m] -= usize::from(may_leave);
                may_leave
            })
        })),
    };
    let mut support = Support::full(o, d);
    for (row, feature) in removed {
        support.row_mut(row)[feature] = false;
    }
    support
}

/// Row and feature of each weight.
fn in_rows(rows: Vec<Vec<(usize, f64)>>) -> Vec<(usize, usize)> {
    let rows = rows.into_iter().enumerate();
    rows.flat_map(|(row, removed)| removed.into_iter().map(move |(feature, _)| (row, feature)))
        .collect()
}

/// Shows the system of all weights of each row, in parallel.
fn each_row(
    problem: &LayerProblem,
    see: impl Fn(&mut Row) -> Vec<(usize, f64)> + Sync,
) -> Vec<Vec<(usize, f64)>> {
    let d = problem.features();
    let (inverse, weights) = (problem.factor().inverse(), problem.optimum());
    (0..problem.outputs())
        .into_par_iter()
        .map(|row| {
            see(&mut Row::new(
                &inverse,
                weights[row * d..(row + 1) * d].to_vec(),
            ))
        })
        .collect()
}

/// The greedy order over all rows: row and feature of each weight.
fn merge(problem: &LayerProblem, rows: Vec<Vec<(usize, f64)>>) -> Vec<(usize, usize)> {
    let next = |row: usize, at: usize| {
        let (feature, loss) = *rows[row].get(at)?;
        Some(Next {
            loss: problem.importance(row) * loss,
            row,
            at,
            feature,
        })
    };
    let mut heap: BinaryHeap<Next> = (0..rows.len()).filter_map(|row| next(row, 0)).collect();
    let mut sequence = Vec::with_capacity(rows.iter().map(Vec::len).sum());
    while let Some(first) = heap.pop() {
        sequence.push((first.row, first.feature));
        heap.extend(next(first.row, first.at + 1));
    }
    sequence
}

/// The next weight of a row; the greatest is the cheapest, of equal ones the first.
struct Next {
    loss: f64,
    row: usize,
    at: usize,
    feature: usize,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        let loss = other.loss.total_cmp(&self.loss);
        loss.then(other.row.cmp(&self.row))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Next {}

/// The kept weights of one row and the inverse of their system.
struct Row {
    /// Feature of each weight.
    places: Vec<usize>,
    alive: Vec<bool>,
    weights: Vec<f64>,
    /// P, of which the lower triangle counts.
    inverse: Vec<Vec<f64>>,
}

impl Row {
    fn new(inverse: &Mat<f64>, weights: Vec<f64>) -> Self {
        let rows = (0..weights.len()).map(|i| (0..=i).map(|j| inverse[(i, j)]).collect());
        Self {
            places: (0..weights.len()).collect(),
            alive: vec![true; weights.len()],
            inverse: rows.collect(),
            weights,
        }
    }

    /// Removes the cheapest weight until `stop` are left, and says which in their order with their
    /// losses. `may_leave` is asked, by feature, about the one that is to be next; one that may not is
    /// never asked about again.
    fn eliminate(
        &mut self,
        stop: usize,
        mut may_leave: impl FnMut(usize) -> bool,
    ) -> Vec<(usize, f64)> {
        let mut left = self.places.len();
        let mut fixed = vec![false; left];
        let mut removed = Vec::new();
        while left > stop {
            let cheapest = (0..self.places.len())
                .filter(|k| self.alive[*k] && !fixed[self.places[*k]])
                .map(|k| (k, self.cost(k)))
                .min_by(|a, b| a.1.total_cmp(&b.1));
            let Some((k, _)) = cheapest else { break };
            let place = self.places[k];
            if !may_leave(place) {
                fixed[place] = true;
                continue;
            }
            removed.push((place, self.remove(k)));
            left -= 1;
            self.compact();
        }
        removed
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.inverse[i.max(j)][i.min(j)]
    }

    /// What removing a weight costs.
    fn cost(&self, k: usize) -> f64 {
        0.5 * self.weights[k] * self.weights[k] / self.inverse[k][k]
    }

    /// Removes a weight; what it costs.
    fn remove(&mut self, k: usize) -> f64 {
        let column: Vec<f64> = (0..self.places.len()).map(|i| self.at(i, k)).collect();
        let pivot = column[k];
        let step = self.weights[k] / pivot;
        let loss = 0.5 * self.weights[k] * step;
        for (i, row) in self.inverse.iter_mut().enumerate() {
            if column[i] == 0.0 {
                continue;
            }
            let factor = column[i] / pivot;
            self.weights[i] -= step * column[i];
            let values = row.iter_mut().zip(&column);
            values.for_each(|(value, c)| *value -= factor * c);
            if let Some(value) = row.get_mut(k) {
                *value = 0.0;
            }
        }
        self.weights[k] = 0.0;
        self.alive[k] = false;
        loss
    }

    /// Leaves out the rows and columns of removed weights, once they are many.
    fn compact(&mut self) {
        let size = self.places.len();
        let alive: Vec<usize> = (0..size).filter(|k| self.alive[*k]).collect();
        if (size - alive.len()) * COMPACT_AT < size {
            return;
        }
        for (to, from) in alive.iter().enumerate() {
            self.places[to] = self.places[*from];
            self.weights[to] = self.weights[*from];
            let mut row = std::mem::take(&mut self.inverse[*from]);
            for (at, k) in alive[..=to].iter().enumerate() {
                row[at] = row[*k];
            }
            row.truncate(to + 1);
            self.inverse[to] = row;
        }
        self.places.truncate(alive.len());
        self.weights.truncate(alive.len());
        self.inverse.truncate(alive.len());
        self.alive = vec![true; alive.len()];
    }
}
