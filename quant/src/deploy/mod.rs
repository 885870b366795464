//! After training: conversion and files.

pub mod compressed_tensors;
pub(crate) mod conversion_report;
pub(crate) mod convert;
pub(crate) mod safetensors_file;

pub use compressed_tensors::{
    CompressedReport, PretrainedFolder, load_compressed_tensors, load_pretrained,
    save_compressed_tensors,
};
pub use conversion_report::{
    ActivationMismatch, ConversionReport, ConvertedWeight, Mismatch, Outcome,
};
pub use convert::{ConvertConfig, Unsupported};
pub use safetensors_file::{LoadConfig, load_safetensors, save_safetensors};
