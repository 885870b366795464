//! Columns of G on the host, one at a time.

use faer::Mat;

use crate::error::PruneError;
use crate::host::read;
use crate::problem::Problem;

/// Elements that stay on the host: 1 GiB in F32. More are read from the device each time.
const RESIDENT_ELEMENTS: usize = 1 << 28;

/// The columns of a problem.
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    problem: &'a Problem,
    /// All of them, one after the other, where they fit.
    resident: Option<Vec<f32>>,
}

impl<'a> Columns<'a> {
    pub(crate) fn new(problem: &'a Problem) -> Result<Self, PruneError> {
        let elements = problem.samples().saturating_mul(problem.parameters());
        let mut columns = Self {
            problem,
            resident: None,
        };
        let gradients = problem.gradients();
        let may_keep = !gradients.is_on_disk() || gradients.may_keep(elements);
        if elements <= RESIDENT_ELEMENTS && may_keep {
            let all: Vec<usize> = (0..problem.parameters()).collect();
            let mut values = Vec::with_capacity(elements);
            columns.each(&all, |_, column| values.extend_from_slice(column))?;
            columns.resident = Some(values);
        }
        Ok(columns)
    }

    /// Shows the columns at `indices` (ascending), each with its index.
    pub(crate) fn each(
        &self,
        indices: &[usize],
        mut see: impl FnMut(usize, &[f32]),
    ) -> Result<(), PruneError> {
        let samples = self.problem.samples();
        if let Some(values) = &self.resident {
            for index in indices {
                see(*index, &values[index * samples..(index + 1) * samples]);
            }
            return Ok(());
        }
        for chunk in self.problem.gradients().chunks(indices) {
            let (first, columns) = chunk?;
            let values = read(columns.transpose())?;
            let pairs = indices[first..].iter().zip(values.chunks_exact(samples));
            pairs.for_each(|(index, column)| see(*index, column));
        }
        Ok(())
    }

    /// The columns at `indices`, in any order, in F64.
    pub(crate) fn matrix(&self, indices: &[usize]) -> Result<Mat<f64>, PruneError> {
        let mut places: Vec<(usize, usize)> = indices.iter().copied().zip(0..).collect();
        places.sort_unstable();
        let sorted: Vec<usize> = places.iter().map(|(index, _)| *index).collect();
        let mut matrix = Mat::zeros(self.problem.samples(), indices.len());
        let mut places = places.iter().map(|(_, place)| *place);
        self.each(&sorted, |_, column| {
            if let Some(place) = places.next() {
                let target = matrix.col_as_slice_mut(place).iter_mut();
                target
                    .zip(column)
                    .for_each(|(to, from)| *to = f64::from(*from));
            }
        })?;
        Ok(matrix)
    }
}

/// aᵀ e, with eight sums that the processor adds up side by side.
pub(crate) fn dot(column: &[f32], vector: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (columns, vectors) = (column.chunks_exact(8), vector.chunks_exact(8));
    let rest: f64 = columns
        .remainder()
        .iter()
        .zip(vectors.remainder())
        .map(|(a, e)| f64::from(*a) * e)
        .sum();
    for (column, vector) in columns.zip(vectors) {
        for ((sum, a), e) in sums.iter_mut().zip(column).zip(vector) {
            *sum += f64::from(*a) * e;
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// e ← e + step · a
pub(crate) fn add(vector: &mut [f64], step: f64, column: &[f32]) {
    for (value, a) in vector.iter_mut().zip(column) {
        *value += step * f64::from(*a);
    }
}
