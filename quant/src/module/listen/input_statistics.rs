//! What a layer's inputs look like, collected batch by batch.

use burn::tensor::{FloatDType, Tensor};
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::{Accum, Mat, MatRef, get_global_parallelism};

use crate::QuantError;

/// Numbers in F64 at a time.
const CHUNK: usize = 1 << 20;

/// Samples `[n, features]`, read from the device.
pub(crate) struct Samples {
    features: usize,
    values: Vec<f32>,
}

impl Samples {
    pub(crate) fn read(samples: Tensor<2>) -> Result<Self, QuantError> {
        let [_, features] = samples.dims();
        let data = samples.detach().cast(FloatDType::F32).try_into_data();
        let data = data.map_err(QuantError::device)?;
        let values = data.iter::<f32>().collect();
        Ok(Self { features, values })
    }

    pub(crate) fn features(&self) -> usize {
        self.features
    }
}

/// Moments of the inputs of one layer: all that weight rounding and bias correction need to know about
/// calibration data, in `O(d²)` memory however many samples there are.
///
/// A sample is one row `x` of the layer's matrix product, of `d` features: a row of a linear
/// layer's input, a patch of a convolution's, `channels_in / groups · height · width` numbers in the order of the
/// weight.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::module::InputStatistics;
///
/// let mut inputs = InputStatistics::new(2);
/// let x = Tensor::<2>::from_data([[1.0, 2.0], [3.0, -6.0]], &Device::flex());
/// inputs.observe(x).unwrap();
/// assert_eq!(inputs.samples(), 2);
/// assert_eq!(inputs.mean(), [2.0, -2.0]);
/// ```
#[derive(Debug, Clone)]
pub struct InputStatistics {
    samples: usize,
    /// `Σ x xᵀ`, `[d, d]`, of which the lower triangle counts; above the diagonal are zeros.
    gram: Mat<f64>,
    sum: Vec<f64>,
}

impl InputStatistics {
    /// No samples yet, of `features` features each.
    ///
    /// # Panics
    ///
    /// Without features.
    pub fn new(features: usize) -> Self {
        assert!(features > 0, "a layer has at least one input");
        Self {
            samples: 0,
            gram: Mat::zeros(features, features),
            sum: vec![0.0; features],
        }
    }

    /// Adds samples `[n, features]`. Reads them from the device.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`] for another number of features, [`QuantError::NonFinite`]
    /// when a value is not finite (nothing is added then), [`QuantError::Device`].
    pub fn observe(&mut self, samples: Tensor<2>) -> Result<(), QuantError> {
        self.add(&Samples::read(samples)?)
    }

    /// Adds samples that were read.
    pub(crate) fn add(&mut self, samples: &Samples) -> Result<(), QuantError> {
        let Samples { features, values } = samples;
        let features = *features;
        QuantError::expect_len("features of a layer's input", self.features(), features)?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(QuantError::NonFinite {
                what: "input of the layer",
            });
        }
        for row in values.chunks_exact(features) {
            for (feature, value) in row.iter().enumerate() {
                self.sum[feature] += f64::from(*value);
            }
        }
        let rows = (CHUNK / features).max(1);
        for chunk in values.chunks(rows * features) {
            let x: Vec<f64> = chunk.iter().copied().map(f64::from).collect();
            let x = MatRef::from_row_major_slice(&x, chunk.len() / features, features);
            triangular::matmul(
                self.gram.as_mut(),
                BlockStructure::TriangularLower,
                Accum::Add,
                x.transpose(),
                BlockStructure::Rectangular,
                x,
                BlockStructure::Rectangular,
                1.0,
                get_global_parallelism(),
            );
        }
        self.samples += values.len() / features;
        Ok(())
    }

    /// Adds all samples of another one, of as many features.
    pub(crate) fn merge(&mut self, other: &Self) -> Result<(), QuantError> {
        let (features, found) = (self.features(), other.features());
        QuantError::expect_len("features of a layer's input", features, found)?;
        for column in 0..features {
            let sums = &mut self.gram.col_as_slice_mut(column)[column..];
            let others = &other.gram.col_as_slice(column)[column..];
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += other;
            }
        }
        for (sum, other) in self.sum.iter_mut().zip(&other.sum) {
            *sum += other;
        }
        self.samples += other.samples;
        Ok(())
    }

    /// Number of features `d`.
    pub fn features(&self) -> usize {
        self.sum.len()
    }

    /// Number of samples `n` so far.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Mean of each feature; NaN without samples.
    pub fn mean(&self) -> Vec<f32> {
        let mean = |sum: &f64| (sum / self.samples as f64) as f32;
        self.sum.iter().map(mean).collect()
    }

    /// An element of `Σ x xᵀ`, which is symmetric.
    pub(crate) fn gram(&self, i: usize, j: usize) -> f64 {
        self.gram[(i.max(j), i.min(j))]
    }

    /// Mean squared error of the outputs when the weight is off by `error`, a matrix
    /// `[outputs, d]`: `tr(E · Σ x xᵀ · Eᵀ) / (n · outputs)`.
    pub(crate) fn output_error(&self, error: MatRef<'_, f64>) -> f64 {
        let (outputs, features) = (error.nrows(), error.ncols());
        let mut product = Mat::<f64>::zeros(outputs, features);
        triangular::matmul(
            product.as_mut(),
            BlockStructure::Rectangular,
            Accum::Replace,
            error,
            BlockStructure::Rectangular,
            self.gram.as_ref(),
            BlockStructure::TriangularLower,
            1.0,
            get_global_parallelism(),
        );
        let mut trace = 0.0;
        for column in 0..features {
            let square = self.gram[(column, column)];
            for row in 0..outputs {
                // The other triangle gives as much; both have the diagonal.
                let (product, error) = (product[(row, column)], error[(row, column)]);
                trace += (2.0 * product - square * error) * error;
            }
        }
        // A sum of squares; rounding may leave a zero slightly negative.
        trace.max(0.0) / (self.samples.max(1) * outputs.max(1)) as f64
    }

    /// Refuses to go on without samples.
    pub(crate) fn require_samples(&self) -> Result<(), QuantError> {
        match self.samples {
            0 => Err(QuantError::NoData {
                what: "the input statistics of the layer".into(),
            }),
            _ => Ok(()),
        }
    }
}
