//! How many bytes a sparse record saves.

use std::fmt;

use burn::tensor::DType;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};

use super::Encoding;

/// Bytes of one tensor in a sparse record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorSize {
    /// Path of the parameter.
    pub path: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Elements with a bit set.
    pub nonzeros: usize,
    /// How it is stored.
    pub encoding: Encoding,
    /// Bytes of its elements in memory.
    pub dense_bytes: usize,
    /// Bytes in the record, without the tensor's entry in the header.
    pub sparse_bytes: usize,
}

/// Bytes of a sparse record, tensor by tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordSizes {
    /// Every tensor, in the model's order.
    pub tensors: Vec<TensorSize>,
    /// Bytes of the elements of all tensors in memory.
    pub dense_bytes: usize,
    /// Bytes of the whole file, header and checksum included.
    pub file_bytes: usize,
}

impl RecordSizes {
    /// Bytes of the elements in memory for each byte of the file.
    pub fn ratio(&self) -> f64 {
        self.dense_bytes as f64 / self.file_bytes as f64
    }
}

impl fmt::Display for RecordSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(NOTHING).set_header([
            "tensor",
            "dtype",
            "shape",
            "stored as",
            "nonzeros",
            "dense bytes",
            "bytes",
        ]);
        let in_tensors: usize = self.tensors.iter().map(|tensor| tensor.sparse_bytes).sum();
        for tensor in &self.tensors {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            table.add_row([
                tensor.path.clone(),
                format!("{:?}", tensor.dtype),
                shape.join("x"),
                tensor.encoding.to_string(),
                tensor.nonzeros.to_string(),
                tensor.dense_bytes.to_string(),
                tensor.sparse_bytes.to_string(),
            ]);
        }
        let nonzeros: usize = self.tensors.iter().map(|tensor| tensor.nonzeros).sum();
        let rest = self.file_bytes - in_tensors;
        let ends = [
            ("header", String::new(), String::new(), rest),
            (
                "file",
                nonzeros.to_string(),
                self.dense_bytes.to_string(),
                self.file_bytes,
            ),
        ];
        for (name, nonzeros, dense, bytes) in ends {
            let none = String::new();
            table.add_row([
                name.to_string(),
                none.clone(),
                none.clone(),
                none,
                nonzeros,
                dense,
                bytes.to_string(),
            ]);
        }
        for column in table.column_iter_mut().skip(4) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        writeln!(f, "{table}")?;
        write!(f, "{:.2} times smaller", self.ratio())
    }
}
