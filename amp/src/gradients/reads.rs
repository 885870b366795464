//! Reads from several devices.

use burn::tensor::{Device, Tensor, TensorData, Transaction, kind};

use crate::AmpError;

/// A read of tensors that may be on several devices: one transaction for each.
#[derive(Default)]
pub(crate) struct Reads {
    count: usize,
    transactions: Vec<(Device, Transaction, Vec<usize>)>,
}

impl Reads {
    /// Adds a tensor; its place among the results is that of its registration.
    pub(crate) fn register<const D: usize, K>(&mut self, tensor: Tensor<D, K>)
    where
        K: kind::Transaction + kind::Autodiff,
    {
        // One transaction takes no tensors with autodiff beside others, whose devices are equal.
        let tensor = tensor.without_autodiff();
        let device = tensor.device();
        let known = self.transactions.iter_mut().find(|(of, ..)| *of == device);
        match known {
            Some((_, transaction, places)) => {
                *transaction = std::mem::take(transaction).register(tensor);
                places.push(self.count);
            }
            None => {
                let transaction = Transaction::default().register(tensor);
                self.transactions
                    .push((device, transaction, vec![self.count]));
            }
        }
        self.count += 1;
    }

    /// Reads and waits.
    pub(crate) fn wait(self) -> Result<Vec<TensorData>, AmpError> {
        let mut found: Vec<(usize, TensorData)> = Vec::with_capacity(self.count);
        for (_, transaction, places) in self.transactions {
            found.extend(places.into_iter().zip(read(transaction)?));
        }
        found.sort_by_key(|(place, _)| *place);
        Ok(found.into_iter().map(|(_, data)| data).collect())
    }
}

/// Reads everything registered, in one go; all of it is on one device.
pub(crate) fn read(transaction: Transaction) -> Result<Vec<TensorData>, AmpError> {
    transaction.try_execute().map_err(|error| AmpError::Device {
        reason: error.to_string(),
    })
}
