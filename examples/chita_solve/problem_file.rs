//! Pruning problems and their solutions in safetensors files.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_lean::prune::GradientMatrix;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo, TensorView, serialize_to_file};

/// Bytes that are read from the file at once.
const CHUNK_BYTES: usize = 4 << 20;
/// The format's own bound on its header.
const LARGEST_HEADER: u64 = 100_000_000;

/// Reads `gradients` and `weights`; the gradients go to the device a few rows at a time.
pub(crate) fn read(
    path: &Path,
    device: &Device,
) -> Result<(GradientMatrix, Tensor<1>), Box<dyn Error>> {
    let failed = |reason: String| format!("cannot read {}: {reason}", path.display());
    let mut file = Safetensors::open(path).map_err(|error| failed(error.to_string()))?;
    let [samples, parameters] = file.shape("gradients").map_err(failed)?;
    let weights: [usize; 1] = file.shape("weights").map_err(failed)?;
    let values = file
        .values("weights", 0, weights[0])
        .map_err(|error| failed(error.to_string()))?;
    let weights = Tensor::from_data(TensorData::new(values, weights), device);

    let mut gradients =
        GradientMatrix::with_capacity(samples, parameters, FloatDType::F32, device)?;
    let rows = (CHUNK_BYTES / (4 * parameters)).max(1);
    for first in (0..samples).step_by(rows) {
        let count = rows.min(samples - first);
        let values = file
            .values("gradients", first * parameters, count * parameters)
            .map_err(|error| failed(error.to_string()))?;
        let values = TensorData::new(values, [count, parameters]);
        gradients.push(Tensor::from_data(values, device))?;
    }
    Ok((gradients, weights))
}

/// Writes `weights` [p] F32 and `support` [k] I64.
pub(crate) fn write(
    path: &Path,
    weights: Tensor<1>,
    support: &[usize],
) -> Result<(), Box<dyn Error>> {
    let values = weights
        .into_data()
        .try_into_vec::<f32>()
        .map_err(|error| format!("{error:?}"))?;
    let weights: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let indices: Vec<u8> = support
        .iter()
        .flat_map(|index| (*index as i64).to_le_bytes())
        .collect();
    let tensors = [
        (
            "weights",
            TensorView::new(Dtype::F32, vec![values.len()], &weights)?,
        ),
        (
            "support",
            TensorView::new(Dtype::I64, vec![support.len()], &indices)?,
        ),
    ];
    serialize_to_file(tensors, None, path)
        .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}

/// A safetensors file of which only the header is in memory.
struct Safetensors {
    file: File,
    /// Where the data begin.
    start: u64,
    tensors: HashMap<String, TensorInfo>,
}

impl Safetensors {
    fn open(path: &Path) -> Result<Self, Box<dyn Error>> {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > LARGEST_HEADER.min(bytes) {
            return Err("this is no safetensors file: its header would be too large".into());
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header)?;
        let needed = (8 + length).saturating_add(metadata.data_len() as u64);
        if bytes < needed {
            return Err(format!("it is cut: {bytes} of {needed} bytes").into());
        }
        let tensors = metadata.tensors().into_iter();
        Ok(Self {
            file,
            start: 8 + length,
            tensors: tensors.map(|(name, info)| (name, info.clone())).collect(),
        })
    }

    /// The shape of an F32 tensor.
    fn shape<const D: usize>(&self, name: &str) -> Result<[usize; D], String> {
        let Some(info) = self.tensors.get(name) else {
            let names: Vec<_> = self.tensors.keys().map(String::as_str).collect();
            return Err(format!("there is no `{name}`, only {}", names.join(", ")));
        };
        if info.dtype != Dtype::F32 {
            return Err(format!("`{name}` is {:?}, not F32", info.dtype));
        }
        let shape = &info.shape;
        <[usize; D]>::try_from(shape.as_slice())
            .map_err(|_| format!("`{name}` is {shape:?}, not of rank {D}"))
    }

    /// `count` values of an F32 tensor, from element `first` on.
    fn values(
        &mut self,
        name: &str,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        let info = self.tensors.get(name).ok_or("no such tensor")?;
        let start = self.start + info.data_offsets.0 as u64 + 4 * first as u64;
        self.file.seek(SeekFrom::Start(start))?;
        let mut bytes = vec![0; 4 * count];
        self.file.read_exact(&mut bytes)?;
        let value = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Ok(bytes.chunks_exact(4).map(value).collect())
    }
}
