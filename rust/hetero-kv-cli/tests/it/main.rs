//! Runs the executable as a user does.

mod cluster;
mod doctor;
mod lab;
mod lab_transports;
mod output;
mod plan;
mod run;
mod verify;
