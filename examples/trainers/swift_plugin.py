from hf_rmsnorm.integrations.swift import register

register()
