//! What is minimised over the weights of a layer.

use std::borrow::Cow;

use faer::Mat;
use faer::linalg::matmul::matmul;
use faer::{Accum, MatRef, get_global_parallelism};

use crate::Gram;
use crate::dense::Factor;
use crate::error::{LayerwiseError, finite, same};

/// What makes a [`LayerProblem`] of a [`Gram`] matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemConfig {
    /// λ as a fraction of the mean of the diagonal of XᵀX/n over features that are not dead; at least
    /// 0. Default 0.01.
    pub ridge: f64,
    /// Whether means are free: the layer has a bias, or a batch normalization that is calibrated anew
    /// follows. Then X and Y count about their means. Default: no.
    pub centered: bool,
    /// What the ridge pulls the weights to. Default: the dense ones.
    pub pull: Pull,
    /// ωᵣ, the weight of each output in the sum, `[o]`, above 0. Default: all 1.
    pub importance: Option<Vec<f64>>,
}

/// What the ridge pulls the weights to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pull {
    /// The dense weights.
    Dense,
    /// Zero.
    Zero,
}

impl ProblemConfig {
    /// The defaults.
    pub fn new() -> Self {
        Self {
            ridge: 0.01,
            centered: false,
            pull: Pull::Dense,
            importance: None,
        }
    }
}

impl Default for ProblemConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// The quadratic of a layer, row by row:
///
/// ```text
/// f(W) = Σᵣ ωᵣ (½ wᵣᵀ H wᵣ − gᵣᵀ wᵣ + ½ cᵣ)
///
/// without targets   H = XᵀX/n + λI   gᵣ = H w₀ᵣ            cᵣ = w₀ᵣᵀ H w₀ᵣ
/// with targets Y    H = XᵀX/n + λI   gᵣ = Xᵀyᵣ/n + λ w₀ᵣ    cᵣ = yᵣᵀyᵣ/n + λ w₀ᵣᵀw₀ᵣ
/// ```
///
/// Without targets that is ½ (w − w₀)ᵀ H (w − w₀), with them ½ E(y − wᵀx)² + ½ λ‖w − w₀‖²;
/// [`Pull::Zero`] leaves out λw₀. Dead features, which are 0 in every row, take no part: their
/// weights cost nothing, so that they go first and end at 0.
#[derive(Debug, Clone)]
pub struct LayerProblem {
    outputs: usize,
    features: usize,
    /// `[d, d]` row by row, symmetric; dead features have a diagonal of their own.
    hessian: Vec<f64>,
    /// `[o, d]`
    linear: Vec<f64>,
    /// `[o]`
    constant: Vec<f64>,
    /// `[o, d]`
    dense: Vec<f32>,
    importance: Vec<f64>,
    dead: Vec<usize>,
    lambda: f64,
    pull: Pull,
    /// Means of X and Y where they are free.
    means: Option<(Vec<f64>, Vec<f64>)>,
    factor: Factor,
}

impl LayerProblem {
    /// The problem of a layer with dense weights `[o, d]`, row by row.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`], [`LayerwiseError::NotFinite`], [`LayerwiseError::InvalidConfig`];
    /// [`LayerwiseError::NoRows`]; [`LayerwiseError::NotPositiveDefinite`] with too little ridge.
    pub fn new(gram: &Gram, dense: &[f32], config: &ProblemConfig) -> Result<Self, LayerwiseError> {
        let (d, o) = (gram.features(), dense.len() / gram.features().max(1));
        let importance = checked(gram, dense, config)?;
        let dead = gram.dead_features(config.centered);
        let mut moments = gram.moments(config.centered);
        let lambda = make_hessian(&mut moments.xx, &dead, config.ridge);
        let w0 = Mat::from_fn(d, o, |j, row| match dead.binary_search(&j) {
            Ok(_) => 0.0,
            Err(_) => f64::from(dense[row * d + j]),
        });
        let has_targets = gram.outputs() > 0;
        let mut linear = Mat::<f64>::zeros(d, o);
        let mut constant = vec![0.0; o];
        let pull = match (has_targets, config.pull) {
            (true, Pull::Dense) => lambda,
            (true, Pull::Zero) => 0.0,
            (false, pull) => {
                matmul(
                    linear.as_mut(),
                    Accum::Replace,
                    moments.xx.as_ref(),
                    w0.as_ref(),
                    1.0,
                    get_global_parallelism(),
                );
                match pull {
                    Pull::Dense => 0.0,
                    Pull::Zero => -lambda,
                }
            }
        };
        for row in 0..o {
            constant[row] = match has_targets {
                true => moments.yy[row],
                false => (0..d).map(|j| linear[(j, row)] * w0[(j, row)]).sum(),
            };
            for j in 0..d {
                let w = w0[(j, row)];
                if has_targets && dead.binary_search(&j).is_err() {
                    linear[(j, row)] = moments.xy[(j, row)];
                }
                linear[(j, row)] += pull * w;
                constant[row] += pull * w * w;
            }
        }
        check_sums(&linear, &constant, &importance)?;
        let factor = Factor::new(moments.xx.as_ref(), lambda)?;
        let means = config.centered.then(|| (gram.mean(), gram.target_mean()));
        Ok(Self {
            outputs: o,
            features: d,
            // Symmetric: its columns, as they lie, are its rows.
            hessian: (0..d)
                .flat_map(|j| moments.xx.col_as_slice(j).iter().copied())
                .collect(),
            linear: (0..o * d).map(|at| linear[(at % d, at / d)]).collect(),
            constant,
            dense: dense.to_vec(),
            importance,
            dead,
            lambda,
            pull: config.pull,
            means,
            factor,
        })
    }

    /// Rows of the weights, o.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Weights of a row, d.
    pub fn features(&self) -> usize {
        self.features
    }

    /// λ, what was added to the diagonal.
    pub fn ridge(&self) -> f64 {
        self.lambda
    }

    /// Features that are 0 in every row, or constant where means are free.
    pub fn dead_features(&self) -> &[usize] {
        &self.dead
    }

    /// The dense weights, `[o, d]`.
    pub fn dense(&self) -> &[f32] {
        &self.dense
    }

    /// H, `[d, d]` row by row: dead features have 1 + λ on the diagonal, and nothing else.
    pub fn hessian(&self) -> &[f64] {
        &self.hessian
    }

    /// The minimum without any zero, H⁻¹ g, `[o, d]`.
    pub fn optimum(&self) -> Vec<f64> {
        let (o, d) = (self.outputs, self.features);
        let right = Mat::from_fn(d, o, |j, row| self.linear[row * d + j]);
        let solved = self.factor.solve(&right);
        (0..o)
            .flat_map(|row| solved.col_as_slice(row).to_vec())
            .collect()
    }

    /// f at these weights, `[o, d]`.
    ///
    /// # Errors
    ///
    /// [`LayerwiseError::Mismatch`] for another number of weights.
    pub fn objective(&self, weights: &[f32]) -> Result<f64, LayerwiseError> {
        same("weights", self.dense.len(), weights.len())?;
        let weights: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
        Ok(self.value(&weights))
    }

    /// The error of the outputs at these weights, `[o, d]`: f without the ridge's share, a part of
    /// [`scale`](Self::scale).
    ///
    /// # Errors
    ///
    /// As [`objective`](Self::objective).
    pub fn error(&self, weights: &[f32]) -> Result<f64, LayerwiseError> {
        let whole = self.objective(weights)?;
        let ridge = self.ridge_share(|at| f64::from(weights[at]));
        // Of nearly the same the difference may be below 0.
        Ok(if whole < ridge { 0.0 } else { whole - ridge })
    }

    /// What the outputs vary by where the layer has no weight at all: f(0), without the ridge's
    /// share. What an [`error`](Self::error) is to be compared with.
    pub fn scale(&self) -> f64 {
        let rows = self.constant.iter().zip(&self.importance);
        let whole: f64 = rows.map(|(c, weight)| 0.5 * weight * c).sum();
        whole - self.ridge_share(|_| 0.0)
    }

    /// The ridge's share of f: ½ λ‖w − p‖² of each output, with p what it pulls to.
    fn ridge_share(&self, weight: impl Fn(usize) -> f64) -> f64 {
        let d = self.features;
        let live = |j: &usize| self.dead.binary_search(j).is_err();
        let row = |row: usize| {
            let squares = (0..d).filter(live).map(|j| {
                let at = row * d + j;
                let pull = match self.pull {
                    Pull::Dense => f64::from(self.dense[at]),
                    Pull::Zero => 0.0,
                };
                (weight(at) - pull).powi(2)
            });
            self.importance[row] * squares.sum::<f64>()
        };
        0.5 * self.lambda * (0..self.outputs).map(row).sum::<f64>()
    }

    /// The intercept that goes with the weights `[o, d]`, `[o]`: E y − W E x; `None` where means are
    /// not free. Without targets y is what the dense weights give, without a bias.
    pub fn intercept(&self, weights: &[f32]) -> Option<Vec<f32>> {
        let (x, y) = self.means.as_ref()?;
        let d = self.features;
        let rows = weights.chunks_exact(d).enumerate().map(|(row, weights)| {
            let target: f64 = match y.get(row) {
                Some(y) => *y,
                None => dot_mixed(&self.dense[row * d..(row + 1) * d], x),
            };
            (target - dot_mixed(weights, x)) as f32
        });
        Some(rows.collect())
    }

    pub(crate) fn value(&self, weights: &[f64]) -> f64 {
        let d = self.features;
        let weights = self.live(weights);
        let mut product = Mat::<f64>::zeros(d, self.outputs);
        matmul(
            product.as_mut(),
            Accum::Replace,
            self.matrix(),
            MatRef::from_column_major_slice(&weights, d, self.outputs),
            1.0,
            get_global_parallelism(),
        );
        let rows = weights.chunks_exact(d).enumerate().map(|(row, w)| {
            let quadratic = product
                .col_as_slice(row)
                .iter()
                .zip(self.linear(row))
                .zip(w);
            let value: f64 = quadratic.map(|((hw, g), w)| w * (0.5 * hw - g)).sum();
            self.importance[row] * (value + 0.5 * self.constant[row])
        });
        rows.sum()
    }

    /// The weights with 0 where features are dead: whatever is there costs nothing.
    fn live<'a>(&self, weights: &'a [f64]) -> Cow<'a, [f64]> {
        let mut weights = Cow::Borrowed(weights);
        if !self.dead.is_empty() {
            for row in weights.to_mut().chunks_exact_mut(self.features) {
                self.dead.iter().for_each(|at| row[*at] = 0.0);
            }
        }
        weights
    }

    /// H `[d, d]`.
    pub(crate) fn matrix(&self) -> MatRef<'_, f64> {
        MatRef::from_row_major_slice(&self.hessian, self.features, self.features)
    }

    pub(crate) fn hessian_row(&self, feature: usize) -> &[f64] {
        &self.hessian[feature * self.features..(feature + 1) * self.features]
    }

    pub(crate) fn linear(&self, row: usize) -> &[f64] {
        &self.linear[row * self.features..(row + 1) * self.features]
    }

    pub(crate) fn constant(&self, row: usize) -> f64 {
        self.constant[row]
    }

    pub(crate) fn importance(&self, row: usize) -> f64 {
        self.importance[row]
    }

    pub(crate) fn factor(&self) -> &Factor {
        &self.factor
    }

    /// With another H, which need not have a factor.
    #[cfg(test)]
    pub(crate) fn with_matrix(self, hessian: Vec<f64>) -> Self {
        Self { hessian, ..self }
    }
}

/// The importances of outputs; refuses what makes no problem.
fn checked(gram: &Gram, dense: &[f32], config: &ProblemConfig) -> Result<Vec<f64>, LayerwiseError> {
    let d = gram.features();
    let o = dense.len() / d.max(1);
    same("weights in whole rows", o * d, dense.len())?;
    finite("the dense weights", dense)?;
    if gram.outputs() > 0 {
        same("outputs of the targets", o, gram.outputs())?;
    }
    if gram.rows() == 0 {
        return Err(LayerwiseError::NoRows);
    }
    let refuse = |field, value: f64, expected| {
        Err(LayerwiseError::InvalidConfig {
            field,
            value: value.to_string(),
            expected,
        })
    };
    if !(config.ridge >= 0.0 && config.ridge.is_finite()) {
        return refuse("ridge", config.ridge, "finite and at least 0");
    }
    let importance = config.importance.clone().unwrap_or_else(|| vec![1.0; o]);
    same("importances of outputs", o, importance.len())?;
    let positive = |weight: &&f64| !(**weight > 0.0 && weight.is_finite());
    if let Some(weight) = importance.iter().find(positive) {
        return refuse("importance", *weight, "finite and above 0");
    }
    Ok(importance)
}

/// Makes H of XᵀX/n: dead features with a diagonal of their own, and λ, which comes back.
fn make_hessian(xx: &mut Mat<f64>, dead: &[usize], ridge: f64) -> f64 {
    let d = xx.nrows();
    let live = (d - dead.len()).max(1) as f64;
    let diagonal: f64 = (0..d)
        .filter(|j| dead.binary_search(j).is_err())
        .map(|j| xx[(j, j)])
        .sum();
    let lambda = ridge * diagonal / live;
    for at in dead {
        for j in 0..d {
            xx[(*at, j)] = 0.0;
            xx[(j, *at)] = 0.0;
        }
        xx[(*at, *at)] = 1.0;
    }
    for j in 0..d {
        xx[(j, j)] += lambda;
    }
    lambda
}

/// Refuses sums that are not finite.
fn check_sums(
    linear: &Mat<f64>,
    constant: &[f64],
    importance: &[f64],
) -> Result<(), LayerwiseError> {
    let (d, o) = (linear.nrows(), linear.ncols());
    let mut weighted = constant.iter().zip(importance);
    if let Some(index) = weighted.position(|(c, weight)| !(c * weight).is_finite()) {
        let what = "the square of the outputs, with ridge and importance,";
        return Err(LayerwiseError::NotFinite { what, index });
    }
    // Products of a chunk of rows are summed in F32.
    if let Some(index) = (0..o * d).find(|at| !linear[(at % d, at / d)].is_finite()) {
        let what = "the sum of products of inputs and targets";
        return Err(LayerwiseError::NotFinite { what, index });
    }
    Ok(())
}

fn dot_mixed(weights: &[f32], values: &[f64]) -> f64 {
    let pairs = weights.iter().zip(values);
    pairs.map(|(w, value)| f64::from(*w) * value).sum()
}
