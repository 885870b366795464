//! The graph as its users see it: one recorded forward pass, executed.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod advice;
mod deep;
mod follows;
mod lean;
mod models;
mod observer;
mod recordings;
mod refuses;
mod rules;
mod sites;
mod units;
mod walk;
mod walk_rows;
