//! A support that shrinks, with its dual system kept up to date.
//!
//! The dual matrix K = 2λ I + G_S G_Sᵀ of a support S costs a product over all columns of S. When
//! weights D leave, it is downdated by −G_D G_Dᵀ, so that all stages of a shrinking support
//! together cost about as much as the first one. From K = L Lᵀ, with u = K⁻¹ t:
//!
//! ```text
//! change of the kept weights      d_j = a_jᵀ u
//! objective of the support        λ (tᵀ u + ‖w₀_P‖²)
//! removing j costs                λ w_j² / (1 − q_j),   q_j = a_jᵀ K⁻¹ a_j
//! ```
//!
//! The last line is the Optimal Brain Surgeon score w_j² / 2[H_S⁻¹]_jj, H_S = G_SᵀG_S + 2λ I.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use crate::error::PruneError;
use crate::fisher::gradient_matrix::{add_product, column};
use crate::host::read;
use crate::problem::{Problem, narrow};
use crate::solver::back_solve::{keeps_few, product_of_pruned};
use crate::solver::factor::{Factor, Symmetric};
use crate::solver::operator::fits;

/// Columns from which the norms of the rows are estimated.
const ROW_NORM_COLUMNS: usize = 1024;

/// Mean leverage below which 1 − q counts as 1.
const NEGLIGIBLE_LEVERAGE: f64 = 0.1;

/// A support with its dual system, over the samples that matter.
#[derive(Debug)]
pub(crate) struct WorkingSet<'a> {
    problem: &'a Problem,
    /// Samples that the search looks at; `None` for all.
    rows: Option<Vec<usize>>,
    /// Ascending.
    support: Vec<usize>,
    /// G_S over these rows, where it is small enough to keep.
    resident: Option<Resident>,
    /// K = 2λ I + G_S G_Sᵀ
    kernel: Symmetric,
    /// t = G_P w₀_P − a·1
    target: Vec<f64>,
}

/// Columns of G that stay where they are while weights leave the support.
#[derive(Debug)]
struct Resident {
    /// Consecutive columns: those of the first support.
    parts: Vec<Tensor<2>>,
    /// Which of them belong to the support, ascending.
    positions: Vec<usize>,
}

impl Resident {
    /// The columns at these positions (ascending), a part at a time.
    fn columns<'a>(&'a self, positions: &'a [usize]) -> impl Iterator<Item = Tensor<2>> + 'a {
        let mut end = 0;
        self.parts.iter().filter_map(move |part| {
            let first = end;
            end += part.dims()[1];
            let from = positions.partition_point(|position| *position < first);
            let to = positions.partition_point(|position| *position < end);
            let local: Vec<usize> = positions[from..to].iter().map(|at| at - first).collect();
            (!local.is_empty()).then(|| select(part, 1, &local))
        })
    }
}

/// The best values on a support.
#[derive(Debug)]
pub(crate) struct Solved {
    /// K = L Lᵀ
    pub(crate) factor: Factor,
    /// u = K⁻¹ t
    pub(crate) dual: Vec<f64>,
    /// The weights on the support, in its order.
    pub(crate) weights: Vec<f32>,
    /// The objective, over the samples of the working set.
    pub(crate) objective: f64,
}

impl<'a> WorkingSet<'a> {
    /// Builds the dual system of `support` (ascending).
    ///
    /// Samples whose gradient is shorter than √(`negligible`·2λ) are left out: against the ridge
    /// none of them can move a weight by itself. 0 keeps all of them.
    pub(crate) fn new(
        problem: &'a Problem,
        support: Vec<usize>,
        negligible: f64,
        shared: &mut Shared,
    ) -> Result<Self, PruneError> {
        let rows = match negligible > 0.0 {
            true => rows_above(problem, &support, negligible * 2.0 * problem.lambda())?,
            false => None,
        };
        let count = rows.as_ref().map_or(problem.samples(), Vec::len);
        let mut kernel = Symmetric::ridge(count, problem.lambda())?;
        let keep = fits(problem, count * support.len());
        let mut parts = Vec::new();
        let mut pruned = match shared.system(problem, &support, count)? {
            Some(system) => {
                kernel.add_rows(&system.gram, rows.as_deref());
                if keep {
                    let columns = problem.gradients().chunks(&support);
                    parts.extend(columns.map(|(_, columns)| restrict(rows.as_deref(), columns)));
                }
                restrict_vector(rows.as_deref(), &system.pruned)
            }
            None => add_columns(&mut kernel, problem, rows.as_deref(), &support, |columns| {
                if keep {
                    parts.push(columns);
                }
            })?,
        };
        if problem.first_order() != 0.0 {
            let shift: Vec<f64> = problem.shift().collect();
            let shift = restrict_vector(rows.as_deref(), &shift);
            pruned.iter_mut().zip(shift).for_each(|(t, a)| *t -= a);
        }
        Ok(Self {
            problem,
            rows,
            resident: keep.then(|| Resident {
                parts,
                positions: (0..support.len()).collect(),
            }),
            kernel,
            target: pruned,
            support,
        })
    }

    /// The kept weights, ascending.
    pub(crate) fn support(&self) -> &[usize] {
        &self.support
    }

    /// Samples that the search looks at; `None` for all.
    pub(crate) fn rows(&self) -> Option<&[usize]> {
        self.rows.as_deref()
    }

    /// The exact minimum on the support.
    pub(crate) fn solve(&self) -> Result<Solved, PruneError> {
        let factor = self.kernel.factor(self.problem.l2())?;
        let dual = factor.solve(&self.target);
        let change = self.transpose_multiply(&dual)?;
        let dense = self.problem.dense();
        let weights = self
            .support
            .iter()
            .zip(change)
            .map(|(index, change)| dense[*index] + change);
        let weights = weights.collect();
        let fit: f64 = self.target.iter().zip(&dual).map(|(t, u)| t * u).sum();
        let square = |weight: f32| f64::from(weight) * f64::from(weight);
        let all: f64 = dense.iter().map(|weight| square(*weight)).sum();
        let kept: f64 = self.support.iter().map(|index| square(dense[*index])).sum();
        Ok(Solved {
            factor,
            dual,
            weights,
            objective: self.problem.lambda() * (fit + all - kept) + self.problem.completed_square(),
        })
    }

    /// What removing each weight of the support alone costs, the others re-solved; an estimate.
    pub(crate) fn removal_costs(&self, solved: &Solved) -> Result<Vec<f64>, PruneError> {
        let lambda = self.problem.lambda();
        // The leverages add up to at most the number of rows: among many weights they are small.
        let mean = solved.dual.len() as f64 / self.support.len() as f64;
        let leverage = match mean < NEGLIGIBLE_LEVERAGE {
            true => vec![0.0; self.support.len()],
            false => self.leverage(&solved.factor)?,
        };
        let cost = |(weight, q): (&f32, f64)| lambda * f64::from(*weight).powi(2) / (1.0 - q);
        Ok(solved.weights.iter().zip(leverage).map(cost).collect())
    }

    /// q_j = a_jᵀ K⁻¹ a_j of the support: exact for few samples, else sketched.
    fn leverage(&self, factor: &Factor) -> Result<Vec<f64>, PruneError> {
        let sketch = factor.sketch();
        let [probes, size] = [sketch.len() / factor.size(), factor.size()];
        let sketch: Tensor<2> = Tensor::from_data(
            TensorData::new(sketch, [probes, size]),
            (&self.problem.device(), DType::F32),
        );
        let leverage = self.of_each_column(|columns| {
            let projected = sketch.clone().matmul(columns);
            (projected.clone() * projected).sum_dim(0)
        })?;
        // A sketch may exceed the true value, which is below 1.
        Ok(leverage
            .into_iter()
            .map(|q| f64::from(q).min(0.999999))
            .collect())
    }

    /// q_j = a_jᵀ K⁻¹ a_j of all p weights.
    pub(crate) fn leverage_of_all(
        &self,
        factor: &Factor,
        exact: bool,
    ) -> Result<Vec<f64>, PruneError> {
        let root = match exact {
            true => factor.inverse_root(),
            false => factor.sketch(),
        };
        let spread: Vec<f32> = root
            .chunks_exact(factor.size())
            .flat_map(|row| {
                let row: Vec<f64> = row.iter().map(|value| f64::from(*value)).collect();
                self.scatter_rows(&row)
            })
            .collect();
        self.problem.gradients().projected_norms(spread)
    }

    /// The working set with `leaving` exchanged against as many weights `entering`.
    pub(crate) fn exchanged(
        &self,
        leaving: &[usize],
        entering: &[usize],
    ) -> Result<Self, PruneError> {
        let dense = self.problem.dense();
        let mut next = Self {
            problem: self.problem,
            rows: self.rows.clone(),
            support: Vec::with_capacity(self.support.len()),
            // Gathered anew when it is needed: the order of its columns would be lost.
            resident: None,
            kernel: self.kernel.clone(),
            target: self.target.clone(),
        };
        for (indices, sign) in [(leaving, -1.0), (entering, 1.0)] {
            let mut indices = indices.to_vec();
            indices.sort_unstable();
            let weights: Vec<f32> = indices.iter().map(|index| dense[*index]).collect();
            let columns = self.problem.gradients().chunks(&indices);
            next.update(
                sign,
                &weights,
                columns.map(|(_, columns)| self.restrict(columns)),
            )?;
        }
        let leaves: std::collections::HashSet<usize> = leaving.iter().copied().collect();
        let stays = self.support.iter().filter(|index| !leaves.contains(index));
        next.support.extend(stays.chain(entering));
        next.support.sort_unstable();
        Ok(next)
    }

    /// Reduces the support to `kept`, a subset of it (ascending), and downdates the system.
    pub(crate) fn shrink(&mut self, kept: Vec<usize>) -> Result<(), PruneError> {
        let mut stays = Vec::with_capacity(kept.len());
        let mut leaves = Vec::with_capacity(self.support.len() - kept.len());
        let mut left = Vec::with_capacity(self.support.len() - kept.len());
        for (position, index) in self.support.iter().enumerate() {
            match kept.binary_search(index) {
                Ok(_) => stays.push(position),
                Err(_) => {
                    leaves.push(position);
                    left.push(*index);
                }
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        let dense = self.problem.dense();
        let weights: Vec<f32> = left.iter().map(|index| dense[*index]).collect();
        match self.resident.take() {
            Some(Resident { parts, positions }) => {
                let at =
                    |of: &[usize]| -> Vec<usize> { of.iter().map(|at| positions[*at]).collect() };
                let resident = Resident {
                    positions: at(&stays),
                    parts,
                };
                self.update(-1.0, &weights, resident.columns(&at(&leaves)))?;
                self.resident = Some(resident);
            }
            None => {
                let problem = self.problem;
                let rows = self.rows.clone();
                let columns = problem.gradients().chunks(&left);
                let columns = columns.map(|(_, columns)| restrict(rows.as_deref(), columns));
                self.update(-1.0, &weights, columns)?;
            }
        }
        self.support = kept;
        Ok(())
    }

    /// Takes weights into the system (`sign` 1) or out of it (−1), by their dense values and their
    /// columns over the rows of the set.
    fn update(
        &mut self,
        sign: f64,
        weights: &[f32],
        columns: impl Iterator<Item = Tensor<2>>,
    ) -> Result<(), PruneError> {
        let mut first = 0;
        for columns in columns {
            let last = first + columns.dims()[1];
            add_product(&mut self.target, -sign, &columns, &weights[first..last])?;
            first = last;
            self.kernel.add_gram(sign, &columns)?;
        }
        Ok(())
    }

    /// G_Sᵀ u.
    fn transpose_multiply(&self, dual: &[f64]) -> Result<Vec<f32>, PruneError> {
        match &self.resident {
            Some(_) => {
                let dual = column(&narrow(dual), &self.problem.device()).transpose();
                self.of_each_column(|columns| dual.clone().matmul(columns))
            }
            None => {
                let all = self.scatter_rows(dual);
                let gradients = self.problem.gradients();
                gradients.transpose_multiply_at(&self.support, &all)
            }
        }
    }

    /// A number for each column of the support: what `compute` makes `[1, c]` of columns.
    fn of_each_column(
        &self,
        compute: impl Fn(Tensor<2>) -> Tensor<2>,
    ) -> Result<Vec<f32>, PruneError> {
        let mut numbers = Vec::new();
        match &self.resident {
            Some(Resident { parts, positions }) => {
                for part in parts {
                    numbers.extend(read(compute(part.clone()))?);
                }
                Ok(positions
                    .iter()
                    .map(|position| numbers[*position])
                    .collect())
            }
            None => {
                for (_, columns) in self.problem.gradients().chunks(&self.support) {
                    numbers.extend(read(compute(self.restrict(columns)))?);
                }
                Ok(numbers)
            }
        }
    }

    /// The rows of the working set.
    pub(crate) fn restrict(&self, columns: Tensor<2>) -> Tensor<2> {
        restrict(self.rows.as_deref(), columns)
    }

    /// A vector over the rows of the working set as one over all samples.
    pub(crate) fn scatter_rows(&self, vector: &[f64]) -> Vec<f32> {
        match &self.rows {
            Some(rows) => {
                let mut all = vec![0.0; self.problem.samples()];
                let pairs = rows.iter().zip(vector);
                pairs.for_each(|(row, value)| all[*row] = *value as f32);
                all
            }
            None => narrow(vector),
        }
    }
}

/// What the searches of a sweep begin with: it depends on the gradients, not on the ridge.
#[derive(Debug)]
pub(crate) enum Shared {
    /// There is one search.
    No,
    /// There are several; the system of their first support, once one of them has begun.
    Yes(Option<System>),
}

/// The dual system of a support over all samples, without the ridge.
#[derive(Debug)]
pub(crate) struct System {
    support: Vec<usize>,
    /// G_S G_Sᵀ
    gram: Symmetric,
    /// G_P w₀_P
    pruned: Vec<f64>,
}

impl Shared {
    /// The system of `support`, if there is one to share and it may be kept. It is not begun by a
    /// search over less than half of the samples, which would rather have its own.
    fn system(
        &mut self,
        problem: &Problem,
        support: &[usize],
        rows: usize,
    ) -> Result<Option<&System>, PruneError> {
        let Self::Yes(system) = self else {
            return Ok(None);
        };
        let samples = problem.samples();
        if system
            .as_ref()
            .is_none_or(|system| system.support != support)
        {
            // One for each tempering is kept beside that of the search.
            if 2 * rows < samples || !Symmetric::fits(4 * samples) {
                return Ok(None);
            }
            let mut gram = Symmetric::ridge(samples, 0.0)?;
            let pruned = add_columns(&mut gram, problem, None, support, |_| {})?;
            *system = Some(System {
                support: support.to_vec(),
                gram,
                pruned,
            });
        }
        Ok(system.as_ref())
    }
}

/// Adds G_S G_Sᵀ over some rows to `kernel`, shows the columns to `see`, and returns G_P w₀_P over
/// these rows.
fn add_columns(
    kernel: &mut Symmetric,
    problem: &Problem,
    rows: Option<&[usize]>,
    support: &[usize],
    mut see: impl FnMut(Tensor<2>),
) -> Result<Vec<f64>, PruneError> {
    let few = keeps_few(problem, support);
    let mut product = vec![0.0; kernel.size()];
    for (first, columns) in problem.gradients().chunks(support) {
        let columns = restrict(rows, columns);
        kernel.add_gram(1.0, &columns)?;
        if few {
            let dense = support[first..first + columns.dims()[1]].iter();
            let dense: Vec<f32> = dense.map(|index| problem.dense()[*index]).collect();
            add_product(&mut product, 1.0, &columns, &dense)?;
        }
        see(columns);
    }
    match few {
        true => {
            let target = restrict_vector(rows, problem.target()).into_iter();
            Ok(target.zip(product).map(|(y, kept)| y - kept).collect())
        }
        false => Ok(restrict_vector(rows, &product_of_pruned(problem, support)?)),
    }
}

/// These elements of a vector; `None` for all.
fn restrict_vector(rows: Option<&[usize]>, vector: &[f64]) -> Vec<f64> {
    match rows {
        Some(rows) => rows.iter().map(|row| vector[*row]).collect(),
        None => vector.to_vec(),
    }
}

/// These rows of columns; `None` for all.
fn restrict(rows: Option<&[usize]>, columns: Tensor<2>) -> Tensor<2> {
    match rows {
        Some(rows) => select(&columns, 0, rows),
        None => columns,
    }
}

/// The slices of a tensor at these positions along `dim`.
pub(crate) fn select(tensor: &Tensor<2>, dim: usize, positions: &[usize]) -> Tensor<2> {
    let count = positions.len();
    let positions: Vec<i64> = positions.iter().map(|position| *position as i64).collect();
    let positions =
        Tensor::<1, Int>::from_data(TensorData::new(positions, [count]), &tensor.device());
    tensor.clone().select(dim, positions)
}

/// The samples whose gradient over `support` has a squared norm above `bound`; `None` for all, or
/// where fewer than a tenth would go.
fn rows_above(
    problem: &Problem,
    support: &[usize],
    bound: f64,
) -> Result<Option<Vec<usize>>, PruneError> {
    let step = support.len().div_ceil(ROW_NORM_COLUMNS).max(1);
    let sampled: Vec<usize> = support.iter().copied().step_by(step).collect();
    let mut norms = vec![0.0; problem.samples()];
    for (_, columns) in problem.gradients().chunks(&sampled) {
        let squares = read((columns.clone() * columns).sum_dim(1).cast(FloatDType::F32))?;
        for (norm, square) in norms.iter_mut().zip(squares) {
            *norm += f64::from(square);
        }
    }
    let scale = support.len() as f64 / sampled.len() as f64;
    let rows: Vec<usize> = (0..norms.len())
        .filter(|row| norms[*row] * scale > bound)
        .collect();
    let few = rows.len() * 10 < norms.len() * 9;
    Ok((few && !rows.is_empty()).then_some(rows))
}
