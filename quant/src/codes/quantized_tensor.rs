//! A quantized tensor on the host: codes, scales, zero points and the scheme they belong to.

use burn::tensor::{DType, Device, Tensor, TensorData, Transaction};
use burn_lean_reparam::{bits, reductions};

use crate::format::groups::Groups;
use crate::{
    QuantError, QuantParams, Scheme,
    fake::{from_codes, qparams::is_scale, to_codes},
};

/// A tensor as integers.
///
/// The number that code `q` stands for is `(q − zero_point) · scale`, with the scale and the zero
/// point of its group; for float formats `q` is a bit pattern.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{NumberFormat, QuantParams, QuantizedTensor, Scheme};
///
/// let device = Device::flex();
/// let scheme = Scheme::symmetric(NumberFormat::int(4).narrow());
/// let x = Tensor::<1>::from_floats([0.7, -0.2, 0.1], &device);
/// let qparams = QuantParams::of(&x, &scheme)?;
/// let quantized = QuantizedTensor::quantize(&x, &qparams, &scheme)?;
/// assert_eq!(quantized.codes(), [7, -2, 1]);
/// assert_eq!(quantized.pack(), [0xe7, 0x01]); // −2 is 0xe; low half first
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Of at most 8 bits, signed or not.
    codes: Vec<i16>,
    shape: Vec<usize>,
    scale: Vec<f32>,
    zero_point: Vec<f32>,
    scheme: Scheme,
}

impl QuantizedTensor {
    /// The codes that fake quantization gives `x`. Reads from the device.
    ///
    /// # Errors
    ///
    /// If the scheme does not fit the shape, a scale is not positive and finite, a value is NaN,
    /// or reading fails.
    pub fn quantize<const D: usize>(
        x: &Tensor<D>,
        qparams: &QuantParams,
        scheme: &Scheme,
    ) -> Result<Self, QuantError> {
        let shape = x.dims().to_vec();
        scheme.validate(&shape)?;
        let x = x.clone().without_autodiff();
        let codes = to_codes(x.clone(), qparams, scheme);
        let data = Transaction::default()
            .register(codes)
            .register(qparams.scale.clone().without_autodiff())
            .register(qparams.zero_point.clone().without_autodiff())
            .register(reductions::any(x.is_nan()))
            .try_execute()
            .map_err(QuantError::device)?;
        let [codes, scale, zero_point, nan] = data.as_slice() else {
            return Err(QuantError::Device {
                reason: "it gave fewer tensors than were asked for".into(),
            });
        };
        if nan.iter::<bool>().any(|nan| nan) {
            return Err(QuantError::NonFinite { what: "tensor" });
        }
        Self::new(
            codes.iter::<i32>().collect(),
            shape,
            scale.iter::<f32>().collect(),
            zero_point.iter::<f32>().collect(),
            scheme.clone(),
        )
    }

    /// Puts together what was stored.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`], [`QuantError::InvalidScale`],
    /// [`QuantError::CodeOutOfRange`], [`QuantError::InvalidConfig`] for a shape of more elements
    /// than can be counted, and what [`Scheme::validate`] finds.
    pub fn new(
        codes: Vec<i32>,
        shape: Vec<usize>,
        scale: Vec<f32>,
        zero_point: Vec<f32>,
        scheme: Scheme,
    ) -> Result<Self, QuantError> {
        let elements = shape
            .iter()
            .try_fold(1_usize, |product, len| product.checked_mul(*len));
        let Some(elements) = elements else {
            return Err(QuantError::InvalidConfig {
                field: "shape",
                value: format!("{shape:?}"),
                expected: "of fewer elements",
            });
        };
        let groups = scheme.group_count(&shape)?;
        QuantError::expect_len("codes", elements, codes.len())?;
        QuantError::expect_len("scales", groups, scale.len())?;
        QuantError::expect_len("zero points", groups, zero_point.len())?;
        if let Some(bad) = scale.iter().find(|s| !is_scale(**s)) {
            return Err(QuantError::InvalidScale {
                what: "the tensor".into(),
                value: *bad,
            });
        }
        let (quant_min, quant_max) = code_range(&scheme);
        let outside = |code: f64| !(f64::from(quant_min)..=f64::from(quant_max)).contains(&code);
        let all = codes.iter().map(|code| f64::from(*code));
        let zero_points = zero_point.iter().map(|zero| f64::from(*zero));
        let of_zero = zero_points.filter(|_| scheme.format.is_int());
        if let Some(code) = all.chain(of_zero).find(|code| outside(*code)) {
            return Err(QuantError::CodeOutOfRange {
                what: "codes or zero points".into(),
                code: code as i64,
                quant_min,
                quant_max,
            });
        }
        let symmetric = scheme
            .mapping
            .is_symmetric()
            .then(|| scheme.symmetric_zero_point());
        let wrong = |zero: &&f32| match symmetric {
            // A file does not hold it.
            Some(expected) => **zero != expected,
            None => scheme.format.is_int() && zero.fract() != 0.0,
        };
        if let Some(zero) = zero_point.iter().find(wrong) {
            return Err(QuantError::InvalidConfig {
                field: "zero_point",
                value: zero.to_string(),
                expected: "one of the codes, of a symmetric mapping the middle one",
            });
        }
        Ok(Self {
            codes: codes.into_iter().map(|code| code as i16).collect(),
            shape,
            scale,
            zero_point,
            scheme,
        })
    }

    /// With the code that stands for 0 at some elements, row-major.
    pub(crate) fn with_zeros(
        mut self,
        zeros: impl Iterator<Item = bool>,
    ) -> Result<Self, QuantError> {
        let groups = self.groups()?;
        for index in zeros
            .enumerate()
            .filter_map(|(index, zero)| zero.then_some(index))
        {
            self.codes[index] = match self.scheme.format.is_int() {
                true => self.zero_point[groups.of_element(index)] as i16,
                false => 0,
            };
        }
        Ok(self)
    }

    /// A matrix with its axes swapped; `scheme` is this one's with its axes swapped.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedRank`] for what is no matrix, and what [`Scheme::validate`] finds.
    pub(crate) fn transposed(&self, scheme: Scheme) -> Result<Self, QuantError> {
        let [rows, columns] = self.shape[..] else {
            return Err(QuantError::UnsupportedRank {
                path: String::new(),
                rank: self.shape.len(),
                expected: "a matrix has two",
            });
        };
        let groups = self.scheme.group_shape(&self.shape)?;
        let shape = vec![columns, rows];
        scheme.validate(&shape)?;
        Ok(Self {
            codes: transposed(&self.codes, rows, columns),
            shape,
            scale: transposed(&self.scale, groups[0], groups[1]),
            zero_point: transposed(&self.zero_point, groups[0], groups[1]),
            scheme,
        })
    }

    /// The codes, row-major.
    pub fn codes(&self) -> &[i16] {
        &self.codes
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The scale of each group, in the order of [`Scheme::group_shape`].
    pub fn scale(&self) -> &[f32] {
        &self.scale
    }

    /// The zero point of each group.
    pub fn zero_point(&self) -> &[f32] {
        &self.zero_point
    }

    /// The scheme.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// For each element the one of these values, row-major as [`scale`](Self::scale), that is its group's.
    ///
    /// # Panics
    ///
    /// If there are fewer than groups.
    pub fn of_elements<T: Copy>(&self, of_groups: &[T]) -> Vec<T> {
        let groups = self
            .groups()
            .expect("the scheme was found to fit the shape");
        let mut values = Vec::with_capacity(self.codes.len());
        groups
            .of_all()
            .for_each(|group| values.push(of_groups[group]));
        values
    }

    pub(crate) fn groups(&self) -> Result<Groups, QuantError> {
        Groups::new(&self.scheme.granularity, &self.shape)
    }

    /// The largest difference to `other`, in steps of this tensor's scales, rounded up.
    ///
    /// # Errors
    ///
    /// [`QuantError::LengthMismatch`] for another number of codes or scales.
    pub(crate) fn largest_difference(&self, other: &Self) -> Result<u32, QuantError> {
        QuantError::expect_len("codes", self.codes.len(), other.codes.len())?;
        QuantError::expect_len("scales", self.scale.len(), other.scale.len())?;
        let groups = self.groups()?;
        let value = |tensor: &Self, index: usize, group: usize| {
            let steps = f64::from(tensor.codes[index]) - f64::from(tensor.zero_point[group]);
            steps * f64::from(tensor.scale[group])
        };
        let difference = |(index, group): (usize, usize)| {
            let off = value(self, index, group) - value(other, index, group);
            (off / f64::from(self.scale[group])).abs().ceil() as u32
        };
        let all = groups.of_all().enumerate();
        Ok(all.map(difference).max().unwrap_or(0))
    }

    /// Scales and zero points, on a device.
    pub(crate) fn qparams(&self, device: &Device) -> QuantParams {
        qparams_on(device, &self.scale, &self.zero_point)
    }

    /// The numbers that the codes stand for, as a tensor of rank `D`.
    ///
    /// # Errors
    ///
    /// [`QuantError::UnsupportedRank`] unless `D` is the rank.
    pub fn dequantize<const D: usize>(&self, device: &Device) -> Result<Tensor<D>, QuantError> {
        if self.shape.len() != D {
            return Err(QuantError::UnsupportedRank {
                path: String::new(),
                rank: self.shape.len(),
                expected: "another rank was asked for",
            });
        }
        let qparams = self.qparams(device);
        let codes: Vec<i32> = self.codes.iter().copied().map(i32::from).collect();
        let codes = TensorData::new(codes, self.shape.clone());
        let codes = Tensor::from_data(codes, device);
        Ok(from_codes(codes, &qparams, &self.scheme))
    }

    /// The codes, as many bits each as the format has, low bits first; the last byte is filled up
    /// with zeros.
    pub fn pack(&self) -> Vec<u8> {
        let codes = self.codes.iter().map(|code| *code as u8);
        bits::pack(codes, self.scheme.format.bits())
    }

    /// Bytes of [`pack`](Self::pack) and of the scales (F32) and, for affine schemes, zero points.
    pub fn packed_bytes(&self) -> usize {
        let codes = bits::packed_len(self.codes.len(), self.scheme.format.bits());
        let zero_points = match self.scheme.mapping.is_symmetric() {
            true => 0,
            false => self.zero_point.len(),
        };
        codes + 4 * self.scale.len() + 4 * zero_points
    }
}

/// Scales and zero points, on a device.
pub(crate) fn qparams_on(device: &Device, scale: &[f32], zero_point: &[f32]) -> QuantParams {
    let of_groups = |values: &[f32]| {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        Tensor::from_data(data, (device, DType::F32))
    };
    QuantParams {
        scale: of_groups(scale),
        zero_point: of_groups(zero_point),
    }
}

/// Row-major `[columns, rows]` from row-major `[rows, columns]`.
pub(crate) fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    let place = |index: usize| values[index % rows * columns + index / rows];
    (0..rows * columns).map(place).collect()
}

/// Smallest and largest code of a scheme; bit patterns for float formats.
pub(crate) fn code_range(scheme: &Scheme) -> (i32, i32) {
    match scheme.format.is_int() {
        true => (scheme.quant_min() as i32, scheme.quant_max() as i32),
        false => (0, (1 << scheme.format.bits()) - 1),
    }
}

/// The inverse of [`QuantizedTensor::pack`]; `None` when there are not as many bytes as `count` codes take.
pub(crate) fn unpack(bytes: &[u8], bits: u8, signed: bool, count: usize) -> Option<Vec<i32>> {
    let above = match signed {
        // The highest bit is the sign.
        true => 32 - u32::from(bits),
        false => 0,
    };
    let codes = bits::unpack(bytes, bits, count)?.into_iter();
    Some(
        codes
            .map(|code| i32::from(code) << above >> above)
            .collect(),
    )
}
