//! After training: conversion, what it comes to in a recorded forward pass, and files.

pub mod compressed_tensors;
pub(crate) mod conversion_report;
pub(crate) mod convert;
pub(crate) mod graph;
pub(crate) mod safetensors_file;

pub use compressed_tensors::{CompressedReport, load_compressed_tensors, save_compressed_tensors};
pub use conversion_report::{
    ActivationMismatch, ConversionReport, ConvertedWeight, Mismatch, Outcome,
};
pub use convert::{ConvertConfig, Unsupported};
pub use graph::{HostQuantParams, QuantizedGraph, QuantizedOperand};
pub use safetensors_file::{LoadConfig, load_safetensors, save_safetensors};
