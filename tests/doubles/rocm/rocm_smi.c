// Stand-in for ROCm's system management library: a machine with one GPU that nobody uses. The
// RDMA backend of amd-mori asks it which GPU is near which device, and ends the process when there
// is no GPU at all.

#include <stdint.h>

enum { SUCCESS = 0, INVALID = 1 };

int rsmi_init(uint64_t flags) {
  (void)flags;
  return SUCCESS;
}

int rsmi_shut_down(void) { return SUCCESS; }

int rsmi_num_monitor_devices(uint32_t *count) {
  *count = 1;
  return SUCCESS;
}

int rsmi_dev_pci_id_get(uint32_t device, uint64_t *bdf) {
  if (device != 0) return INVALID;
  *bdf = 0x100;  // bus 1, device 0, function 0
  return SUCCESS;
}

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  if (from != 0 || to != 0) return INVALID;
  *hops = 0;
  *type = 0;
  return SUCCESS;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  if (from != 0 || to != 0) return INVALID;
  *weight = 0;
  return SUCCESS;
}

int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, int *accessible) {
  if (from != 0 || to != 0) return INVALID;
  *accessible = 1;
  return SUCCESS;
}

int rsmi_status_string(int status, const char **text) {
  *text = status == SUCCESS ? "success" : "no such device";
  return SUCCESS;
}
