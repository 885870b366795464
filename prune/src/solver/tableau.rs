//! A few kept and pruned weights with everything that is known of them together, so that one after
//! the other can enter and leave without a system to be solved.
//!
//! With K and u of the support ([`working_set`](super::working_set)), B = A ᵀ K⁻¹ A over the columns A
//! of these weights, v = w₀ + Aᵀ u, q = diag B, and σ = 1 for a weight that enters, −1 for one that
//! leaves:
//!
//! ```text
//! the objective changes by      −σ λ v_j² / (1 + σ q_j)
//! v ← v − σ B_j v_j / (1 + σ q_j)
//! B ← B − σ B_j B_jᵀ / (1 + σ q_j)
//! ```

use faer::Mat;

/// Leverages of kept weights are below 1; rounding may lift them above.
const LEAST: f64 = 1e-9;

/// Some weights, kept and pruned.
#[derive(Debug, Clone)]
pub(crate) struct Tableau {
    kept: Vec<bool>,
    /// v
    wishes: Vec<f64>,
    /// B, a column after the other.
    gram: Mat<f64>,
}

impl Tableau {
    pub(crate) fn new(kept: Vec<bool>, wishes: Vec<f64>, gram: Mat<f64>) -> Self {
        Self { kept, wishes, gram }
    }

    /// Which of them are kept.
    pub(crate) fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// Lets the weight at a place leave if it is kept, enter if not.
    pub(crate) fn toggle(&mut self, place: usize) {
        let sign = if self.kept[place] { -1.0 } else { 1.0 };
        let column = self.gram.col_as_slice(place).to_vec();
        let factor = sign / (1.0 + sign * column[place]).max(LEAST);
        let wish = factor * self.wishes[place];
        for (at, own) in column.iter().enumerate() {
            self.wishes[at] -= wish * own;
            let own = factor * own;
            if own != 0.0 {
                let pairs = self.gram.col_as_slice_mut(at).iter_mut().zip(&column);
                pairs.for_each(|(value, other)| *value -= own * other);
            }
        }
        self.kept[place] = !self.kept[place];
    }

    /// The allowed exchange that gains most, if it gains more than `least` times λ: the places of
    /// what leaves and what enters.
    pub(crate) fn best_swap(
        &self,
        least: f64,
        allowed: impl Fn(usize, usize) -> bool,
    ) -> Option<(usize, usize)> {
        let places = 0..self.kept.len();
        let pruned: Vec<usize> = places.clone().filter(|at| !self.kept[*at]).collect();
        let mut most = least;
        let mut best = None;
        for leaves in places.filter(|at| self.kept[*at]) {
            let column = self.gram.col_as_slice(leaves);
            let rest = 1.0 / (1.0 - column[leaves]).max(LEAST);
            let shift = self.wishes[leaves] * rest;
            let cost = self.wishes[leaves] * shift;
            for enters in &pruned {
                let cross = column[*enters];
                let wish = self.wishes[*enters] + cross * shift;
                let curvature = 1.0 + self.gram[(*enters, *enters)] + cross * cross * rest;
                // gain > most, without a division for each pair.
                if wish * wish > (most + cost) * curvature && allowed(leaves, *enters) {
                    most = wish * wish / curvature - cost;
                    best = Some((leaves, *enters));
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A weight that enters and leaves again leaves everything as it was.
    #[test]
    fn a_toggle_is_undone_by_another_one() {
        let gram = Mat::from_fn(3, 3, |row, column| match row == column {
            true => 0.5,
            false => 0.2,
        });
        let mut tableau = Tableau::new(vec![true, false, false], vec![1.0, 2.0, -3.0], gram);
        let before = tableau.clone();
        for place in [0, 1] {
            tableau.toggle(place);
            assert_eq!(tableau.kept()[place], place == 1);
            tableau.toggle(place);
        }
        for at in 0..3 {
            assert!((tableau.wishes[at] - before.wishes[at]).abs() < 1e-12);
            for other in 0..3 {
                let gap = tableau.gram[(at, other)] - before.gram[(at, other)];
                assert!(gap.abs() < 1e-12);
            }
        }
    }

    /// B and v of one sample with λ = ½, so that K = 1 + the squares of the kept: by hand.
    #[test]
    fn entering_and_leaving_are_those_of_the_system() {
        let (a, dense) = ([1.0, 2.0, 0.5], [1.0, -1.0, 3.0]);
        let of = |kept: [bool; 3]| {
            let sum = |f: &dyn Fn(usize) -> f64, side: bool| -> f64 {
                (0..3).filter(|at| kept[*at] == side).map(f).sum()
            };
            let system = 1.0 + sum(&|at| a[at] * a[at], true);
            let dual = sum(&|at| a[at] * dense[at], false) / system;
            let wishes: Vec<f64> = (0..3).map(|at| dense[at] + a[at] * dual).collect();
            let gram = Mat::from_fn(3, 3, |row, column| a[row] * a[column] / system);
            Tableau::new(kept.to_vec(), wishes, gram)
        };
        let mut tableau = of([true, false, false]);
        tableau.toggle(2);
        tableau.toggle(0);
        let expected = of([false, false, true]);
        assert_eq!(tableau.kept, expected.kept);
        for at in 0..3 {
            assert!((tableau.wishes[at] - expected.wishes[at]).abs() < 1e-12);
            for other in 0..3 {
                let gap = tableau.gram[(at, other)] - expected.gram[(at, other)];
                assert!(gap.abs() < 1e-12);
            }
        }
    }
}
