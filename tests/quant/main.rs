//! The `quant` crate as its users see it, on every device.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod attribute;
mod audit;
mod cached;
mod calibration;
mod chains;
mod checkpointing;
mod codes;
mod column_layout;
mod compressed_foreign;
mod compressed_models;
mod compressed_tensors;
mod compressed_tensors_refused;
mod convert;
mod fake_quantize;
mod file_activations;
mod files;
mod fold;
mod granularity;
mod half_models;
mod health;
mod histograms;
mod in_product;
mod integer;
mod layers;
mod learned;
mod learning;
mod norm_pairs;
mod observing;
mod own_quantizers;
mod prepare;
mod pretrained;
mod protected;
mod ptq;
mod qparams;
mod quantizers;
mod ragged;
mod ranges;
mod records;
mod residency;
mod rounding;
mod scheme;
mod sensitivity;
mod sites;
mod sites_models;
mod storage;
mod stored;
mod threads;
mod unedited;
mod unobserved;
mod weight_scales;
