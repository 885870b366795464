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

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use faer::Mat;

use crate::error::PruneError;
use crate::fisher::gradient_matrix::{add_product, column};
use crate::host::{read, select};
use crate::problem::{Problem, narrow};
use crate::solver::back_solve::{keeps_few, product_of_pruned};
use crate::solver::exact::host;
use crate::solver::factor::{Factor, Symmetric};
use crate::solver::resident::Resident;

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
        let keep = problem.gradients().may_keep(count * support.len());
        let mut parts = Vec::new();
        let mut pruned = match shared.system(problem, &support, count)? {
            Some(system) => {
                kernel.add_rows(&system.gram, rows.as_deref());
                if keep {
                    for chunk in problem.gradients().chunks(&support) {
                        parts.push(restrict(rows.as_deref(), chunk?.1));
                    }
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
            resident: keep.then(|| Resident::new(&support, parts)),
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
        let ridge = self.problem.ridge();
        let factor = match self.kernel.factor(ridge) {
            // The ridge may have been lost in sums of F32 products: those of F64 tell.
            Err(PruneError::NotPositiveDefinite { .. }) => self.exact_kernel()?.factor(ridge)?,
            factor => factor?,
        };
        let dual = factor.solve(&self.target);
        let change = self.transpose_multiply(&self.support, &dual)?;
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

    /// The kernel again, in F64.
    fn exact_kernel(&self) -> Result<Symmetric, PruneError> {
        let mut kernel = Symmetric::ridge(self.kernel.size(), self.problem.lambda())?;
        for chunk in self.problem.gradients().chunks(&self.support) {
            let columns = restrict(self.rows.as_deref(), chunk?.1);
            kernel.add_exact_gram(1.0, host(columns)?.as_ref());
        }
        Ok(kernel)
    }

    /// What removing each weight of the support alone costs, the others re-solved; an estimate.
    pub(crate) fn removal_costs(&self, solved: &Solved) -> Result<Vec<f64>, PruneError> {
        // The leverages add up to at most the number of rows: among many weights they are small.
        let mean = solved.dual.len() as f64 / self.support.len() as f64;
        let leverage = match mean < NEGLIGIBLE_LEVERAGE {
            true => vec![0.0; self.support.len()],
            false => self.leverage(&self.support, &solved.factor)?,
        };
        let lambda = self.problem.lambda();
        let pairs = solved.weights.iter().zip(leverage);
        Ok(pairs.map(|(w, q)| removal_cost(lambda, *w, q)).collect())
    }

    /// q_j = a_jᵀ K⁻¹ a_j of these weights (ascending): exact for few samples, else sketched.
    pub(crate) fn leverage(
        &self,
        weights: &[usize],
        factor: &Factor,
    ) -> Result<Vec<f64>, PruneError> {
        let sketch = factor.sketch();
        let [probes, size] = [sketch.len() / factor.size(), factor.size()];
        let sketch: Tensor<2> = Tensor::from_data(
            TensorData::new(sketch, [probes, size]),
            (&self.problem.device(), DType::F32),
        );
        let leverage = self.of_each_column(weights, |columns| {
            let projected = sketch.clone().matmul(columns);
            (projected.clone() * projected).sum_dim(0)
        })?;
        Ok(leverage.into_iter().map(f64::from).collect())
    }

    /// v_j = w₀_j + a_jᵀ u of these weights (ascending): the value of a kept one, the wish of a
    /// pruned one.
    pub(crate) fn wishes(
        &self,
        weights: &[usize],
        solved: &Solved,
    ) -> Result<Vec<f32>, PruneError> {
        let change = self.transpose_multiply(weights, &solved.dual)?;
        let dense = weights.iter().map(|index| self.problem.dense()[*index]);
        Ok(dense
            .zip(change)
            .map(|(dense, change)| dense + change)
            .collect())
    }

    /// Columns of these weights (ascending) on the host, over the rows of the set.
    pub(crate) fn columns(&self, weights: &[usize]) -> Result<Mat<f64>, PruneError> {
        let rows = self.kernel.size();
        let mut all = Mat::zeros(rows, weights.len());
        if weights.is_empty() {
            return Ok(all);
        }
        let mut put = |places: &mut dyn Iterator<Item = usize>, columns: Tensor<2>| {
            let values = read(columns.transpose())?;
            for (column, place) in values.chunks_exact(rows).zip(places) {
                let to = all.col_as_slice_mut(place).iter_mut();
                to.zip(column)
                    .for_each(|(to, value)| *to = f64::from(*value));
            }
            Ok::<_, PruneError>(())
        };
        match self.has(weights) {
            Some(resident) => {
                let (positions, order) = resident.columns_of(weights);
                let place = |index: usize| weights.partition_point(|other| *other < index);
                let mut places = order.into_iter().map(place);
                for part in resident.columns(&positions) {
                    let count = part.dims()[1];
                    put(&mut places.by_ref().take(count), part)?;
                }
            }
            None => {
                let columns = self.problem.gradients().columns(weights)?;
                put(&mut (0..weights.len()), self.restrict(columns))?;
            }
        }
        Ok(all)
    }

    /// The weights whose columns are at hand, ascending; `None` where they are too many to be kept.
    pub(crate) fn resident(&self) -> Option<&[usize]> {
        let resident = self.resident.as_ref();
        resident.map(|resident| resident.weights.as_slice())
    }

    /// Keeps the columns of these weights (ascending) at hand too, if there is room for them.
    pub(crate) fn keep(&mut self, weights: &[usize]) -> Result<(), PruneError> {
        let Some(mut resident) = self.resident.take() else {
            return Ok(());
        };
        let missing = resident.missing(weights);
        let count = resident.weights.len() + missing.len();
        let gradients = self.problem.gradients();
        if !missing.is_empty() && gradients.may_keep(self.kernel.size() * count) {
            let columns = gradients.chunks(&missing);
            let columns = columns.map(|chunk| Ok(self.restrict(chunk?.1)));
            resident.extend(&missing, columns.collect::<Result<_, PruneError>>()?);
        }
        self.resident = Some(resident);
        Ok(())
    }

    /// The working set with `leaving` exchanged against `entering`.
    pub(crate) fn exchanged(
        &self,
        leaving: &[usize],
        entering: &[usize],
    ) -> Result<Self, PruneError> {
        let mut leaving = leaving.to_vec();
        leaving.sort_unstable();
        let stays = self.support.iter().copied();
        let stays = stays.filter(|index| leaving.binary_search(index).is_err());
        let mut next = Self {
            problem: self.problem,
            rows: self.rows.clone(),
            support: stays.collect(),
            resident: self.resident.clone(),
            kernel: self.kernel.clone(),
            target: self.target.clone(),
        };
        next.update(-1.0, &leaving)?;
        next.widen(entering)?;
        Ok(next)
    }

    /// Takes weights into the support, and into the system.
    pub(crate) fn widen(&mut self, entering: &[usize]) -> Result<(), PruneError> {
        let mut entering = entering.to_vec();
        entering.sort_unstable();
        self.keep(&entering)?;
        self.update(1.0, &entering)?;
        let resident = self.resident.take();
        self.resident = resident.filter(|resident| resident.missing(&entering).is_empty());
        self.support.extend(entering);
        self.support.sort_unstable();
        Ok(())
    }

    /// Reduces the support to `kept`, a subset of it (ascending), and downdates the system.
    pub(crate) fn shrink(&mut self, kept: Vec<usize>) -> Result<(), PruneError> {
        let leaves = |index: &usize| kept.binary_search(index).is_err();
        let leaving: Vec<usize> = self.support.iter().copied().filter(leaves).collect();
        self.update(-1.0, &leaving)?;
        self.support = kept;
        Ok(())
    }

    /// Takes weights (ascending) into the system (`sign` 1) or out of it (−1).
    fn update(&mut self, sign: f64, weights: &[usize]) -> Result<(), PruneError> {
        if weights.is_empty() {
            return Ok(());
        }
        let resident = self.resident.take();
        let at_hand = resident.as_ref();
        let at_hand = at_hand.filter(|resident| resident.missing(weights).is_empty());
        let updated = match at_hand {
            Some(resident) => {
                let (positions, order) = resident.columns_of(weights);
                self.add(sign, &order, resident.columns(&positions).map(Ok))
            }
            None => {
                let (problem, rows) = (self.problem, self.rows.clone());
                let columns = problem.gradients().chunks(weights);
                let columns = columns.map(|chunk| Ok(restrict(rows.as_deref(), chunk?.1)));
                self.add(sign, weights, columns)
            }
        };
        self.resident = resident;
        updated
    }

    /// Adds `sign` times these columns, those of `weights` in their order.
    fn add(
        &mut self,
        sign: f64,
        weights: &[usize],
        columns: impl Iterator<Item = Result<Tensor<2>, PruneError>>,
    ) -> Result<(), PruneError> {
        let dense = self.problem.dense();
        let dense: Vec<f32> = weights.iter().map(|index| dense[*index]).collect();
        let mut first = 0;
        for columns in columns {
            let columns = columns?;
            let last = first + columns.dims()[1];
            add_product(&mut self.target, -sign, &columns, &dense[first..last])?;
            first = last;
            self.kernel.add_gram(sign, &columns)?;
        }
        Ok(())
    }

    /// G_Wᵀ u for these weights (ascending).
    fn transpose_multiply(&self, weights: &[usize], dual: &[f64]) -> Result<Vec<f32>, PruneError> {
        match self.has(weights) {
            Some(_) => {
                let dual = column(&narrow(dual), &self.problem.device()).transpose();
                self.of_each_column(weights, |columns| dual.clone().matmul(columns))
            }
            None => {
                let all = self.scatter_rows(dual);
                let gradients = self.problem.gradients();
                gradients.transpose_multiply_at(weights, &all)
            }
        }
    }

    /// The resident columns where all of these weights (ascending) are among them.
    fn has(&self, weights: &[usize]) -> Option<&Resident> {
        let resident = self.resident.as_ref()?;
        resident.missing(weights).is_empty().then_some(resident)
    }

    /// A number for each of these weights (ascending): what `compute` makes `[1, c]` of columns.
    fn of_each_column(
        &self,
        weights: &[usize],
        compute: impl Fn(Tensor<2>) -> Tensor<2>,
    ) -> Result<Vec<f32>, PruneError> {
        let mut numbers = Vec::new();
        match self.has(weights) {
            Some(resident) if 4 * weights.len() < resident.weights.len() => {
                let (positions, order) = resident.columns_of(weights);
                for part in resident.columns(&positions) {
                    numbers.extend(read(compute(part))?);
                }
                let mut pairs: Vec<(usize, f32)> = order.into_iter().zip(numbers).collect();
                pairs.sort_unstable_by_key(|(index, _)| *index);
                Ok(pairs.into_iter().map(|(_, number)| number).collect())
            }
            Some(resident) => {
                for part in &resident.parts {
                    numbers.extend(read(compute(part.clone()))?);
                }
                let positions = resident.positions_of(weights).into_iter();
                Ok(positions.map(|position| numbers[position]).collect())
            }
            None => {
                for chunk in self.problem.gradients().chunks(weights) {
                    numbers.extend(read(compute(self.restrict(chunk?.1)))?);
                }
                Ok(numbers)
            }
        }
    }

    /// The rows of the working set.
    fn restrict(&self, columns: Tensor<2>) -> Tensor<2> {
        restrict(self.rows.as_deref(), columns)
    }

    /// A vector over the rows of the working set as one over all samples.
    fn scatter_rows(&self, vector: &[f64]) -> Vec<f32> {
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

/// λ w² / (1 − q): what removing a weight costs, the others re-solved.
pub(crate) fn removal_cost(lambda: f64, weight: f32, leverage: f64) -> f64 {
    // A sketch may exceed the true value, which is below 1.
    lambda * f64::from(weight).powi(2) / (1.0 - leverage.min(0.999999))
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
    for chunk in problem.gradients().chunks(support) {
        let (first, columns) = chunk?;
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
        Some(rows) => select(columns, 0, rows.iter().copied()),
        None => columns,
    }
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
    for chunk in problem.gradients().chunks(&sampled) {
        let (_, columns) = chunk?;
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
