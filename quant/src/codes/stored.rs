//! How a quantized weight is stored in a parameter, and what its values are.
//!
//! Burn's quantized tensors have blocks of at most 255 along an axis. A channel of 257 weights would
//! be 257 blocks. Such a weight is stored as its codes, a quantized tensor of scale 1, and its
//! quantizer keeps the scales of the channels.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::fake::codes::from_numbers;
use crate::fake::op::to_dtype;
use crate::range::observer::read;
use crate::{FakeQuantize, NumberFormat, QuantError, QuantizedTensor, Scheme};

/// A quantized tensor of Burn.
pub(crate) enum Stored<const D: usize> {
    /// Of the weight's values.
    Values(Tensor<D>),
    /// Of its codes.
    Codes(Tensor<D>),
}

impl<const D: usize> Stored<D> {
    fn tensor(&self) -> &Tensor<D> {
        match self {
            Self::Values(tensor) | Self::Codes(tensor) => tensor,
        }
    }

    pub(crate) fn device(&self) -> Device {
        self.tensor().device()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.tensor().dtype()
    }
}

/// Why a weight is not stored quantized.
pub(crate) enum NotStored {
    /// It would be no smaller than its floats.
    NoSmaller(String),
    Error(QuantError),
}

impl QuantizedTensor {
    /// As a quantized tensor of Burn, of the values if Burn's blocks hold their scales.
    pub(crate) fn store<const D: usize>(&self, device: &Device) -> Result<Stored<D>, NotStored> {
        let error = match self.to_burn::<D>(device) {
            Ok(values) => return Ok(Stored::Values(values)),
            Err(error) => error,
        };
        let (true, QuantError::UnsupportedStorage { reason, .. }) = (self.has_no_blocks(), &error)
        else {
            return Err(NotStored::Error(error));
        };
        // A byte for each code, and scale and zero point for each group.
        if self.codes().len() + 8 * self.scale().len() >= 4 * self.codes().len() {
            return Err(NotStored::NoSmaller(reason.clone()));
        }
        let codes = self.as_codes().map_err(NotStored::Error)?;
        let codes = codes.to_burn::<D>(device);
        codes.map(Stored::Codes).map_err(NotStored::Error)
    }

    /// The codes as numbers, of scale 1.
    fn as_codes(&self) -> Result<Self, QuantError> {
        let codes = self.codes().iter().copied().map(i32::from).collect();
        let scheme = code_scheme(self.scheme());
        Self::new(codes, self.shape().to_vec(), vec![1.0], vec![0.0], scheme)
    }

    /// What is stored in a parameter that carries `quantizer`.
    ///
    /// # Errors
    ///
    /// As [`from_burn`](Self::from_burn).
    pub(crate) fn from_stored<const D: usize>(
        stored: Tensor<D>,
        quantizer: &FakeQuantize,
    ) -> Result<Self, QuantError> {
        let scheme = quantizer.scheme();
        let Some(qparams) = quantizer.of_codes() else {
            return Self::from_burn(stored, scheme);
        };
        let shape = stored.dims().to_vec();
        // Of scale 1: their values are themselves. GPUs do not give every quantized tensor back as it
        // is held.
        let codes = read(numbers(stored))?;
        Self::new(
            codes.into_iter().map(|code| code as i32).collect(),
            shape,
            read(qparams.scale)?,
            read(qparams.zero_point)?,
            scheme.clone(),
        )
    }
}

/// The numbers of a tensor, whether it is quantized or not.
fn numbers<const D: usize>(stored: Tensor<D>) -> Tensor<D> {
    match stored.dtype() {
        DType::QFloat(_) => stored.dequantize(),
        _ => stored,
    }
}

/// That of the codes of a weight.
pub(crate) fn code_scheme(scheme: &Scheme) -> Scheme {
    Scheme::symmetric(match scheme.format {
        NumberFormat::Int { bits, .. } => NumberFormat::int(bits),
        float => float,
    })
}

impl FakeQuantize {
    /// The values of the weight that is stored as the quantized tensor `stored`, or as floats of its
    /// codes; in its dtype.
    pub(crate) fn stored_values<const D: usize>(&self, stored: Tensor<D>) -> Tensor<D> {
        let values = match self.of_codes() {
            Some(qparams) => {
                let codes = numbers(stored).cast(FloatDType::F32);
                from_numbers(codes, &qparams, self.scheme())
            }
            None => numbers(stored),
        };
        to_dtype(values, self.dtype())
    }
}
