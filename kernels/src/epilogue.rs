//! What happens to the sums of a product before they are stored.

use crate::layout::WIDTH;

/// What happens to the sums of each column.
///
/// ```text
/// y = clamp(((sum + code bias) · row scale · scale + bias) · gain + shift)
/// ```
///
/// Each part is left out unless it is given; all but the row scale are of one number for each column.
#[derive(Debug, Clone, PartialEq)]
pub struct Epilogue {
    columns: usize,
    codes: Option<Vec<i32>>,
    row_scale: Option<Vec<f32>>,
    scale: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    gain: Option<[Vec<f32>; 2]>,
    clamp: Option<[f32; 2]>,
}

fn checked<T: Copy>(values: &[T], columns: usize) -> Vec<T> {
    assert_eq!(values.len(), columns, "one number for each column");
    values.to_vec()
}

/// The numbers of a panel; the last one is filled up.
#[inline(always)]
fn of_panel<T: Copy + Default>(values: &[T], panel: usize) -> [T; WIDTH] {
    let values = &values[panel * WIDTH..];
    match values.first_chunk::<WIDTH>() {
        Some(whole) => *whole,
        None => {
            let mut filled = [T::default(); WIDTH];
            filled[..values.len()].copy_from_slice(values);
            filled
        }
    }
}

impl Epilogue {
    /// The sums as they are.
    pub fn new(columns: usize) -> Self {
        Self {
            columns,
            codes: None,
            row_scale: None,
            scale: None,
            bias: None,
            gain: None,
            clamp: None,
        }
    }

    /// With integers added to sums of codes, before anything else. Products of other sums refuse it.
    ///
    /// # Panics
    ///
    /// Here and below, unless there is one number for each column.
    pub fn with_code_bias(mut self, bias: &[i32]) -> Self {
        self.codes = Some(checked(bias, self.columns));
        self
    }

    /// With a factor for each row, before those of the columns.
    pub fn with_row_scale(mut self, scale: Vec<f32>) -> Self {
        self.row_scale = Some(scale);
        self
    }

    /// Puts a factor for each row in the place of those that it has, which are given back. So the other numbers, which
    /// do not change with the rows, need not be copied for each product.
    pub fn replace_row_scale(&mut self, scale: Option<Vec<f32>>) -> Option<Vec<f32>> {
        std::mem::replace(&mut self.row_scale, scale)
    }

    /// With a factor.
    pub fn with_scale(mut self, scale: &[f32]) -> Self {
        self.scale = Some(checked(scale, self.columns));
        self
    }

    /// With an addend.
    pub fn with_bias(mut self, bias: &[f32]) -> Self {
        self.bias = Some(checked(bias, self.columns));
        self
    }

    /// With a factor and an addend after the bias: a normalization whose statistics are known.
    pub fn with_gain(mut self, gain: &[f32], shift: &[f32]) -> Self {
        let both = [gain, shift];
        self.gain = Some(both.map(|values| checked(values, self.columns)));
        self
    }

    /// With results that are not below one number and not above another. NaN stays NaN.
    pub fn with_clamp(mut self, low: f32, high: f32) -> Self {
        self.clamp = Some([low, high]);
        self
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        let parts = [self.codes.is_some(), self.scale.is_some()];
        let parts = parts.into_iter().chain([self.bias.is_some()]);
        let parts = parts.chain([self.gain.is_some(); 2]);
        let of_rows = self.row_scale.as_ref().map_or(0, Vec::len);
        4 * (self.columns * parts.filter(|is_there| *is_there).count() + of_rows)
    }

    /// It is for so many rows and columns; a bias of codes, for sums of codes.
    pub(crate) fn check(&self, [rows, columns]: [usize; 2], are_codes: bool) {
        assert_eq!(self.columns, columns, "the epilogue is of other columns");
        let of_rows = self.row_scale.as_ref().map_or(rows, Vec::len);
        assert_eq!(of_rows, rows, "the epilogue is of other rows");
        let adds_codes = self.codes.is_some();
        assert!(
            are_codes || !adds_codes,
            "its bias is of codes, the sums are not"
        );
    }

    /// Of sums of codes of a row.
    #[inline(always)]
    pub(crate) fn of_codes(&self, row: usize, panel: usize, sums: &[i32; WIDTH]) -> [f32; WIDTH] {
        let mut sums = *sums;
        if let Some(codes) = &self.codes {
            for (sum, bias) in sums.iter_mut().zip(&of_panel(codes, panel)) {
                *sum = sum.wrapping_add(*bias);
            }
        }
        let mut values = [0.0; WIDTH];
        for (value, sum) in values.iter_mut().zip(&sums) {
            *value = *sum as f32;
        }
        self.of_rows(row, panel, values)
    }

    /// Of sums of a row that are floats: also those of codes that were multiplied by scales.
    #[inline(always)]
    pub(crate) fn of_rows(
        &self,
        row: usize,
        panel: usize,
        mut values: [f32; WIDTH],
    ) -> [f32; WIDTH] {
        if let Some(scales) = &self.row_scale {
            let scale = scales[row];
            values.iter_mut().for_each(|value| *value *= scale);
        }
        self.of_floats(panel, &mut values);
        values
    }

    #[inline(always)]
    fn of_floats(&self, panel: usize, values: &mut [f32; WIDTH]) {
        if let Some(scale) = &self.scale {
            for (value, scale) in values.iter_mut().zip(&of_panel(scale, panel)) {
                *value *= scale;
            }
        }
        if let Some(bias) = &self.bias {
            for (value, bias) in values.iter_mut().zip(&of_panel(bias, panel)) {
                *value += bias;
            }
        }
        if let Some(gain) = &self.gain {
            let [gain, shift] = [of_panel(&gain[0], panel), of_panel(&gain[1], panel)];
            for ((value, gain), shift) in values.iter_mut().zip(gain).zip(shift) {
                *value = *value * gain + shift;
            }
        }
        if let Some([low, high]) = self.clamp {
            for value in values.iter_mut() {
                *value = limit(*value, low, high);
            }
        }
    }
}

/// `f32::clamp` without its check of the limits.
#[inline(always)]
pub(crate) fn limit(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}
