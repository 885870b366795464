//! Best-subset search in one row: exchanges, then splicing.
//!
//! An exchange takes one weight out and another one in; each is priced exactly, so that where none is
//! left no single exchange improves. *Splicing* goes further: the m most useful features enter, then
//! the m cheapest weights leave, one after the other, with all others solved for again, or the other
//! way round; m is halved where neither improves
//! ([ABESS, Zhu et al., 2020](https://www.pnas.org/doi/10.1073/pnas.2014241117)).

use crate::Keep;
use crate::tableau::Tableau;

/// Exchanges in a row of the layer, at most.
const MAX_EXCHANGES: usize = 1000;
/// Features that a splice begins with.
const SPLICE: usize = 8;
/// Moves count that lower the objective of a row by this fraction.
pub(crate) const TOLERANCE: f64 = 1e-5;

/// Improves the support of a row, of which f is ½ `constant` more than the tableau says.
pub(crate) fn improve(mut tableau: Tableau, keep: &Keep, constant: f64) -> Tableau {
    let mut exchanges = MAX_EXCHANGES;
    let mut splice = match keep {
        // One of a group can only be exchanged with one of the same group.
        Keep::NOfM { .. } => 0,
        _ => SPLICE,
    };
    loop {
        let least = |tableau: &Tableau| {
            let value = tableau.objective() + 0.5 * constant;
            TOLERANCE * value.max(0.0) + 1e-12 * constant
        };
        while exchanges > 0
            && let Some((i, j, gain)) = best_exchange(&tableau, keep)
            && gain > least(&tableau)
        {
            tableau.leave(i);
            tableau.enter(j);
            exchanges -= 1;
        }
        loop {
            let kept = tableau.kept().iter().filter(|kept| **kept).count();
            splice = splice.min(kept).min(tableau.size() - kept);
            if splice == 0 {
                return tableau;
            }
            let better = [true, false].into_iter().find_map(|enter_first| {
                let spliced = spliced(&tableau, splice, enter_first);
                let gained = tableau.objective() - spliced.objective();
                (gained > least(&tableau)).then_some(spliced)
            });
            if let Some(better) = better {
                tableau = better;
                break;
            }
            splice /= 2;
        }
    }
}

/// The exchange that gains most: what leaves, what enters, and the gain.
fn best_exchange(tableau: &Tableau, keep: &Keep) -> Option<(usize, usize, f64)> {
    let size = tableau.size();
    let kept = tableau.kept();
    let group = match keep {
        Keep::NOfM { m, .. } => *m,
        _ => size,
    };
    let diagonal: Vec<f64> = (0..size).map(|at| tableau.diagonal(at)).collect();
    let gradient = tableau.gradient();
    let mut best: Option<(usize, usize, f64)> = None;
    for i in (0..size).filter(|i| kept[*i]) {
        let factor = tableau.weight(i) / diagonal[i];
        let cost = tableau.cost(i);
        let per_pivot = 1.0 / diagonal[i];
        let row = tableau.row(i);
        let first = i / group * group;
        for j in first..first + group {
            if kept[j] {
                continue;
            }
            let r = gradient[j] - row[j] * factor;
            let gain = 0.5 * r * r / (diagonal[j] + row[j] * row[j] * per_pivot) - cost;
            if best.is_none_or(|(_, _, most)| gain > most) {
                best = Some((i, j, gain));
            }
        }
    }
    best
}

/// After that many of the best features have entered and as many of the cheapest weights have left, in
/// this order or in the other one.
fn spliced(tableau: &Tableau, count: usize, enter_first: bool) -> Tableau {
    let mut tableau = tableau.clone();
    for enter in [enter_first, !enter_first] {
        for _ in 0..count {
            if enter && let Some((at, _)) = best_entry(&tableau) {
                tableau.enter(at);
            }
            if !enter && let Some((at, _)) = cheapest(&tableau) {
                tableau.leave(at);
            }
        }
    }
    tableau
}

/// The feature that gains most by entering.
pub(crate) fn best_entry(tableau: &Tableau) -> Option<(usize, f64)> {
    (0..tableau.size())
        .filter(|at| !tableau.kept()[*at])
        .map(|at| (at, tableau.gain(at)))
        .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
}

/// The weight that costs least by leaving.
pub(crate) fn cheapest(tableau: &Tableau) -> Option<(usize, f64)> {
    (0..tableau.size())
        .filter(|at| tableau.kept()[*at])
        .map(|at| (at, tableau.cost(at)))
        .min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
}
