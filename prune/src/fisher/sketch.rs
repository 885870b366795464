//! More Fisher samples in the same bytes: S of ℓ rows with SᵀS ≈ GᵀG.
//!
//! ```text
//! Q G = [ḡ/√n; H]        ḡ = Gᵀ1,  Q orthogonal,  ‖H‖ the spread of the gradients about their mean
//! S   = [ḡ/√n; sketch of H]
//! ```
//!
//! GᵀG = ḡḡᵀ/n + HᵀH, so that only H is approximated. The first row times √n is the sum of all
//! gradients: the first-order term of the problem, a·Gᵀ1, is exact, and so are its constants, since
//! Sᵀc = Gᵀ1 and ‖c‖² = n for c = (√n, 0, …). The fit ½‖G d‖² becomes ½‖S d‖².
//!
//! A batch of rows X joins the n₀ before it by one reflection of [ḡ/√n₀; X] along the samples, which
//! takes (√n₀, 1, …, 1)/√n to (1, 0, …, 0); what is left of X are rows of H.

use burn::config::Config;
use burn::tensor::{Device, FloatDType};
use burn_lean_reparam::reductions;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::error::PruneError;
use crate::fisher::gradient_matrix::{GradientMatrix, column};
use crate::host::read;
use crate::model::checks::accept;

/// Bytes of columns that are rotated at once.
const CHUNK_BYTES: usize = 4 << 20;

/// A sketch of the Fisher samples instead of all of them.
///
/// Each row is a sum of every (ℓ − 1)th of the samples with random signs: nearly free, and right on
/// average. ‖SᵀS − GᵀG‖_F² is about 2‖H‖_F⁴/ℓ.
///
/// A sparse random projection with one entry to a column ([Finding Frequent Items in Data Streams,
/// Charikar et al., 2002](https://doi.org/10.1007/3-540-45465-9_59); [Woodruff, Sketching as a Tool
/// for Numerical Linear Algebra, 2014, section 2](https://arxiv.org/abs/1411.4357)), its entries in
/// turn instead of at random.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_prune::{FisherConfig, Selection, SketchConfig};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(2, 1).with_bias(false).init(&device);
/// let selection = Selection::of(&model, None)?;
/// // Six gradients, each the input itself, in the bytes of three, beside the rows of one pass.
/// let x = Tensor::<2>::from_floats([[1., 2.], [3., 4.], [5., 6.], [1., 0.], [0., 1.], [2., 5.]], &device);
/// let fisher = FisherConfig::new(6)
///     .with_sketch(Some(SketchConfig::new(3)))
///     .collect(&model, &selection, |model, x: &Tensor<2>| model.forward(x.clone()).mean(), [x])?;
/// assert_eq!(fisher.report.bytes, 3 * 2 * 4);
/// // The sum of the six, (12, 18), divided by √6.
/// let sum = fisher.gradients.row(0)?;
/// assert!((sum[0] - 12. / 6_f32.sqrt()).abs() < 1e-5 && (sum[1] - 18. / 6_f32.sqrt()).abs() < 1e-5);
/// # Ok::<(), burn_lean_prune::PruneError>(())
/// ```
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub struct SketchConfig {
    /// Rows ℓ that take the place of n: from 3 to n − 1, in F32. One is the sum of all gradients.
    pub rows: usize,
}

/// How far a sketch is from what it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SketchReport {
    /// Rows ℓ.
    pub rows: usize,
    /// A bound of the root of the mean of ‖GᵀG − SᵀS‖_F² over the signs.
    pub error: f64,
    /// ‖G‖_F², the sum of the squares of all gradients, for comparison.
    pub squared_norm: f64,
}

impl SketchConfig {
    pub(crate) fn check(&self, samples: usize, dtype: FloatDType) -> Result<(), PruneError> {
        let fits = (3..samples).contains(&self.rows);
        let expected = "at least 3, and fewer than Fisher samples";
        accept(fits, "sketch.rows", self.rows, expected)?;
        let expected = "F32 with a sketch, whose rows are sums";
        let is_single = dtype == FloatDType::F32;
        accept(is_single, "dtype", format!("{dtype:?}"), expected)
    }
}

/// The same signs in each sketch.
fn signs() -> StdRng {
    StdRng::seed_from_u64(0)
}

/// A sketch that grows.
#[derive(Debug)]
pub(crate) struct Sketch {
    config: SketchConfig,
    rows: GradientMatrix,
    /// Fisher samples that are in it.
    samples: usize,
    /// Which row behind the first the next sample is added to.
    turn: usize,
    /// Sums of ‖h‖² and of ‖h‖⁴ in each row behind the first.
    sums: Vec<[f64; 2]>,
    /// ‖H‖_F²
    spread: f64,
    signs: StdRng,
}

impl Sketch {
    pub(crate) fn new(
        config: SketchConfig,
        parameters: usize,
        device: &Device,
    ) -> Result<Self, PruneError> {
        let dtype = FloatDType::F32;
        Ok(Self {
            config,
            rows: GradientMatrix::with_capacity(config.rows, parameters, dtype, device)?,
            samples: 0,
            turn: 0,
            sums: vec![[0.0; 2]; config.rows - 1],
            spread: 0.0,
            signs: signs(),
        })
    }

    /// Begins again, in the same memory.
    pub(crate) fn restart(&mut self) -> Result<(), PruneError> {
        self.rows.clear(0..self.config.rows)?;
        (self.samples, self.turn, self.spread) = (0, 0, 0.0);
        self.sums.fill([0.0; 2]);
        self.signs = signs();
        Ok(())
    }

    pub(crate) fn samples(&self) -> usize {
        self.samples
    }

    /// Takes in the first `count` rows of `new`, which become those of H.
    pub(crate) fn add(&mut self, new: &mut GradientMatrix, count: usize) -> Result<(), PruneError> {
        let first = usize::from(self.samples == 0);
        if first == 1 {
            // The mean of one; nothing is spread.
            for columns in self.columns() {
                let row = new.part(0..1, columns.clone())?;
                self.rows.write(0..1, columns.start, row)?;
            }
            self.samples = 1;
        }
        if first == count {
            return Ok(());
        }
        let squares = self.reflect(new, first..count)?;
        self.samples += count - first;
        self.spread += squares.iter().sum::<f64>();
        self.sum_up(new, first..count, &squares)
    }

    /// The sketch of everything that was added.
    pub(crate) fn finish(self) -> Result<(GradientMatrix, SketchReport), PruneError> {
        let rows = self.config.rows;
        let mut ones = vec![0.0; rows];
        ones[0] = (self.samples as f64).sqrt();
        let mut mean = 0.0;
        for columns in self.columns() {
            let squares = self.rows.part(0..1, columns)?.square().sum();
            mean += f64::from(read(squares)?[0]);
        }
        // The terms of two samples in one row, h gᵀ + g hᵀ with a random sign, have the square
        // 2‖h‖²‖g‖² + 2(hᵀg)².
        let pairs = self.sums.iter().map(|[sum, squares]| sum * sum - squares);
        let report = SketchReport {
            rows,
            error: (2.0 * pairs.sum::<f64>()).max(0.0).sqrt(),
            squared_norm: mean + self.spread,
        };
        Ok((self.rows.sketching(ones), report))
    }

    /// Columns that are worked on at once.
    fn columns(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let parameters = self.rows.parameters();
        let width = (CHUNK_BYTES / (size_of::<f32>() * self.config.rows)).max(1);
        let starts = (0..parameters).step_by(width);
        starts.map(move |start| start..parameters.min(start + width))
    }

    /// Brings the mean up to date; `rows` of `new` become those of H. Returns their squares.
    fn reflect(
        &mut self,
        new: &mut GradientMatrix,
        rows: std::ops::Range<usize>,
    ) -> Result<Vec<f64>, PruneError> {
        let before = self.samples as f64;
        let root = (before + rows.len() as f64).sqrt();
        let cosine = before.sqrt() / root;
        let mut squares = vec![0.0; rows.len()];
        for columns in self.columns() {
            let part = new.part(rows.clone(), columns.clone())?;
            let mean = self.rows.part(0..1, columns.clone())?;
            let sum = part.clone().sum_dim(0) / root;
            let shift = (sum.clone() / (1.0 - cosine) - mean.clone()) / root;
            self.rows.write(0..1, columns.start, mean * cosine + sum)?;
            let part = part - shift;
            let lengths = read(reductions::sum_dim(part.clone().square(), 1))?;
            let pairs = squares.iter_mut().zip(lengths);
            pairs.for_each(|(square, length)| *square += f64::from(length));
            new.write(rows.clone(), columns.start, part)?;
        }
        Ok(squares)
    }

    /// Rows with random signs are added to those of the sketch in turn.
    fn sum_up(
        &mut self,
        new: &GradientMatrix,
        rows: std::ops::Range<usize>,
        squares: &[f64],
    ) -> Result<(), PruneError> {
        let room = self.config.rows - 1;
        let signs = rows.clone().map(|_| match self.signs.random::<bool>() {
            true => 1.0,
            false => -1.0,
        });
        let signs: Vec<f32> = signs.collect();
        let mut next = 0;
        while next < signs.len() {
            let count = (signs.len() - next).min(room - self.turn);
            let from = rows.start + next..rows.start + next + count;
            let to = 1 + self.turn..1 + self.turn + count;
            let signs = column(&signs[next..next + count], &self.rows.device());
            for columns in self.columns() {
                let part = new.part(from.clone(), columns.clone())? * signs.clone();
                let sum = self.rows.part(to.clone(), columns.clone())? + part;
                self.rows.write(to.clone(), columns.start, sum)?;
            }
            let sums = self.sums[self.turn..].iter_mut();
            for (sums, square) in sums.zip(&squares[next..next + count]) {
                sums[0] += square;
                sums[1] += square * square;
            }
            (next, self.turn) = (next + count, (self.turn + count) % room);
        }
        Ok(())
    }
}
