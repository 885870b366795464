//! Inputs of which each sum is known.

use burn::tensor::{Tensor, TensorData};

/// An input `[rows, inputs]` of which each column has one 1 or −1.
pub(super) struct Comb {
    pub(super) rows: usize,
    pub(super) inputs: usize,
}

impl Comb {
    /// The row that multiplies this input, and by what.
    fn tooth(&self, input: usize) -> (usize, f32) {
        let mixed = (input as u32).wrapping_mul(0x9E37_79B9);
        let sign = match mixed.count_ones().is_multiple_of(2) {
            true => 1.0,
            false => -1.0,
        };
        (input % self.rows, sign)
    }

    /// In this shape, on the device of another tensor and in its dtype.
    pub(super) fn tensor<const D: usize, const E: usize>(
        &self,
        shape: [usize; D],
        like: &Tensor<E>,
    ) -> Tensor<D> {
        let mut numbers = vec![0.0; self.rows * self.inputs];
        for input in 0..self.inputs {
            let (row, sign) = self.tooth(input);
            numbers[row * self.inputs + input] = sign;
        }
        let data = TensorData::new(numbers, shape);
        Tensor::from_data(data, (&like.device(), like.dtype()))
    }

    /// The product with a weight `[inputs, outputs]`.
    pub(super) fn times(&self, weight: &[f32], outputs: usize) -> Sums {
        let mut sums = Sums::new(self, outputs, self.inputs);
        for (input, numbers) in weight.chunks(outputs).enumerate() {
            let (row, sign) = self.tooth(input);
            let of_row = row * outputs..(row + 1) * outputs;
            let found = sums.sums[of_row.clone()].iter_mut();
            for ((sum, magnitude), number) in found.zip(&mut sums.magnitudes[of_row]).zip(numbers) {
                *sum += f64::from(sign * number);
                *magnitude += f64::from(number.abs());
            }
        }
        sums
    }

    /// What each row, as an image of a single window, gives with a kernel `[outputs, terms]` of so many groups.
    #[cfg(feature = "kernels")]
    pub(super) fn through(&self, kernel: &[f32], outputs: usize, groups: usize) -> Sums {
        let terms = kernel.len() / outputs;
        let mut sums = Sums::new(self, outputs, terms);
        for (output, numbers) in kernel.chunks(terms).enumerate() {
            let first = output / (outputs / groups) * terms;
            for (input, number) in (first..).zip(numbers) {
                let (row, sign) = self.tooth(input);
                let at = row * outputs + output;
                sums.sums[at] += f64::from(sign * number);
                sums.magnitudes[at] += f64::from(number.abs());
            }
        }
        sums
    }
}

/// What a product is, `[rows, outputs]`.
pub(super) struct Sums {
    sums: Vec<f64>,
    magnitudes: Vec<f64>,
    /// In each sum, at most.
    additions: usize,
}

impl Sums {
    fn new(comb: &Comb, outputs: usize, terms: usize) -> Self {
        let numbers = comb.rows * outputs;
        Self {
            sums: vec![0.0; numbers],
            magnitudes: vec![0.0; numbers],
            additions: terms.div_ceil(comb.rows),
        }
    }

    /// Whether a product of codes, `of` something, is as far off as F32 sums of so many terms can be in steps of this,
    /// or as that of floats.
    ///
    /// # Errors
    ///
    /// How far it is off.
    pub(super) fn judge(
        &self,
        [floats, codes]: [&[f32]; 2],
        step: f64,
        of: &str,
    ) -> Result<(), String> {
        let floats = self.largest_difference(floats);
        let codes = self.largest_difference(codes);
        // Each of the additions rounds by half a step at most, and so does each number.
        let allowed = ((self.additions as f64 + 1.0) * step).max(4.0 * floats);
        // NaN is wrong, too.
        match codes <= allowed {
            true => Ok(()),
            false => Err(format!(
                "the {of} and its codes is off by {codes:.1e} of the sum of magnitudes, and by {floats:.1e} with its \
                 floats"
            )),
        }
    }

    /// The largest difference as a part of the sum of magnitudes; NaN if there is one.
    fn largest_difference(&self, found: &[f32]) -> f64 {
        let differences = found.iter().zip(self.sums.iter().zip(&self.magnitudes));
        differences.fold(0.0, |largest, (found, (sum, magnitude))| {
            let difference = (f64::from(*found) - sum).abs();
            let part = match difference == 0.0 {
                true => 0.0,
                false => difference / magnitude,
            };
            match part > largest || part.is_nan() {
                true => part,
                false => largest,
            }
        })
    }
}
